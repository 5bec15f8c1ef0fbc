"""``halfstep.TrainStep``: a training step as one call, eager, compiled, or replayed as CUDA graphs."""

from .amp.train_step import *  # noqa: F403
from .amp.train_step import __all__ as __all__
