"""Tools for the values of a run: statistics of tensors over steps, and the place at which two runs diverge.

``Monitor`` records a ``Row`` for each tensor of the steps it samples, and ``write_report`` draws them.
``compare_step`` and ``compare`` find the module that adds the error of 16 bits, ``parity`` the first op at which two
callables round differently. ``op_table`` counts the ops of one step.
"""

from typing import Any

from ...core.names_above import NAMES_ABOVE
from ..observe.row import Row, load_rows, merge_rows, save_rows
from .compare_runs import compare
from .compare_step import compare_step
from .comparison import Comparison, Entry
from .monitor import Monitor
from .op_table import CastRow, OpRow, OpTable, op_table
from .report import write_report

__all__ = [
    "CastRow",
    "Comparison",
    "Entry",
    "Monitor",
    "OpRow",
    "OpTable",
    "Row",
    "compare",
    "compare_step",
    "load_rows",
    "merge_rows",
    "op_table",
    "parity",
    "save_rows",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name == "parity":  # of a room above, which is imported when asked for
        return NAMES_ABOVE[name]()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
