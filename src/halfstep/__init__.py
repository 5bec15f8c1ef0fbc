"""Mixed-precision training for PyTorch.

Everything NVIDIA Apex's ``amp`` and Paddle's AMP do, on CPU and GPU: opt levels O0 to O3, op lists, loss scaling,
fp32 masters behind 16-bit weights. ``from halfstep import amp`` is where a script begins.
"""

from . import amp
from ._version import __version__
from .core.errors import HalfstepError
from .core.oplists import OpLists
from .core.policy import Policy
from .engine.scaling import DynamicLossScale, StaticLossScale

__all__ = ["DynamicLossScale", "HalfstepError", "OpLists", "Policy", "StaticLossScale", "__version__", "amp"]
