"""Find the first op at which two runs round differently, and which rounding one of them does more."""

from .recorded import Run
from .result import KINDS, Difference, Op, Parity
from .two_sides import batch_invariance, parity, record

__all__ = ["KINDS", "Difference", "Op", "Parity", "Run", "batch_invariance", "parity", "record"]
