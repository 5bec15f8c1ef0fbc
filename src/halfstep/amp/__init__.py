"""Apex's ``amp`` and what belongs to it: opt levels, loss scaling around the backward pass, op casting."""

from ..core.errors import PrecisionWarning
from ..core.hardware import is_bfloat16_supported, is_float16_supported
from ..engine.casting.ops import deactivate, disable_casts
from .decorate import decorate
from .grad_scaler import GradScaler
from .handle import init
from .initialize import initialize
from .scale_loss import scale_loss
from .session import _amp_state as _amp_state
from .session import load_state_dict, master_params, state_dict, steps_skipped

__all__ = [
    "GradScaler",
    "PrecisionWarning",
    "deactivate",
    "decorate",
    "disable_casts",
    "init",
    "initialize",
    "is_bfloat16_supported",
    "is_float16_supported",
    "load_state_dict",
    "master_params",
    "scale_loss",
    "state_dict",
    "steps_skipped",
]
