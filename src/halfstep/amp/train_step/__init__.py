"""``halfstep.TrainStep``: a training step as one call, eager, compiled, or replayed as CUDA graphs."""

from .signature import Signature
from .step import TrainStep

__all__ = ["Signature", "TrainStep"]
