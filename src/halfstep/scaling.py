"""The rules that move a loss scale, as values: ``rule.update(state, found_inf)`` is a pure function of tensors."""

from .core.errors import LossScaleCollapsed
from .core.loss_scale import DynamicLossScale, LossScale, LossScaleState, StaticLossScale

__all__ = [
    "DynamicLossScale",
    "LossScale",
    "LossScaleCollapsed",
    "LossScaleState",
    "StaticLossScale",
]
__dir__ = __all__.copy
