"""The ``amp`` API: opt levels, loss scaling around the backward pass, op casting, with Apex's and Paddle's names."""

import importlib
from typing import Any

from ..casting.modules import exempt
from ..casting.scope import deactivate, disable_casts
from ..casting.user_functions import (
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from ..core.errors import PrecisionWarning, UnsafeOpError
from ..core.hardware import is_bfloat16_supported, is_float16_supported
from ..core.names_above import NAMES_ABOVE
from .auto_cast import auto_cast, autocast
from .decorate import decorate
from .give_masters import give_masters, has_masters
from .grad_scaler import GradScaler
from .initialize import initialize
from .master_model import master_model
from .session import load_state_dict, master_params, scale_loss, state_dict, steps_skipped

__all__ = [
    "GradScaler",
    "PrecisionWarning",
    "UnsafeOpError",
    "auto_cast",
    "autocast",
    "deactivate",
    "decorate",
    "disable_casts",
    "exempt",
    "float_function",
    "give_masters",
    "half_function",
    "has_masters",
    "init",
    "initialize",
    "is_bfloat16_supported",
    "is_float16_supported",
    "load_state_dict",
    "master_model",
    "master_params",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "set_products",
    "state_dict",
    "steps_skipped",
]
__dir__ = [*__all__, "debugging"].copy


def __getattr__(name: str) -> Any:
    if name == "debugging":  # imported on first use, because few scripts use it
        return importlib.import_module(".debugging", __name__)
    if name in ("init", "_amp_state", "set_products"):  # few scripts use them
        return NAMES_ABOVE[name]()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
