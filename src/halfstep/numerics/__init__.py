"""See the numbers of a run: what tensors look like, step by step, and where two runs part.

``Monitor`` writes down a ``Row`` for each tensor of the steps it samples.
"""

from .monitor import Monitor
from .row import Row, load_rows, merge_rows, save_rows

__all__ = ["Monitor", "Row", "load_rows", "merge_rows", "save_rows"]
