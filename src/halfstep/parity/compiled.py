"""What compiled code rounds differently, told from its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .recorded import Run
from .result import Difference

__all__ = ["compiled_difference", "is_compiled"]


def is_compiled(side: Any) -> bool:
    """True for a model or function that ``torch.compile`` returned."""
    return hasattr(side, "_orig_mod") or hasattr(side, "_torchdynamo_orig_callable")


def compiled_difference(
    names: tuple[str, str], sides: Sequence[Any], inputs: Any, runs: Sequence[Run]
) -> Difference | None:
    return None
