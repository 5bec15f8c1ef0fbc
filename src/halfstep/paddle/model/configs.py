"""Parsing of the ``amp_configs`` of ``Model.prepare``."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Any

from ...core.errors import ArgumentTypeError, ArgumentValueError

__all__ = ["LIST_KEYS", "SCALER_KEYS", "read_configs"]

LEVELS = ("O0", "O1", "O2")
SCALER_KEYS = (
    "init_loss_scaling",
    "incr_ratio",
    "decr_ratio",
    "incr_every_n_steps",
    "decr_every_n_nan_or_inf",
    "use_dynamic_loss_scaling",
)
LIST_KEYS = ("custom_white_list", "custom_black_list", "custom_wide_list")


def read_configs(amp_configs: Any) -> tuple[str, dict[str, Any]]:
    """Return the level, and the values of the other keys.

    Raises:
        ArgumentTypeError: if ``amp_configs`` is neither None, a level nor a dict.
        ArgumentValueError: for an unknown level or key.

    Source: Paddle 3.3, ``paddle.Model.prepare``, from which the defaults are taken.
    """
    is_level = isinstance(amp_configs, str)
    if not is_level and not isinstance(amp_configs, Mapping | NoneType):
        raise ArgumentTypeError(f"amp_configs should be a level or a dict, not {type(amp_configs).__name__}.")
    configs = {"level": amp_configs} if is_level else dict(amp_configs or {})
    level = configs.pop("level", "O1" if configs else "O0")
    if level not in LEVELS:
        where = "The level of amp_configs" if is_level else "amp_configs['level']"
        raise ArgumentValueError(f"{where} should be 'O0', 'O1' or 'O2', not {level!r}.")
    if "use_pure_fp16" in configs:
        raise ArgumentValueError("'use_pure_fp16' is no key of amp_configs; write 'level': 'O2' instead.")
    for key in ("use_fp16_guard", "custom_black_varnames"):
        if key in configs:
            raise ArgumentValueError(f"{key!r} is supported in static graph mode only; leave it out of amp_configs.")
    allowed = ("dtype", "emulate", *LIST_KEYS, *SCALER_KEYS)
    if unknown := [key for key in configs if key not in allowed]:
        raise ArgumentValueError(f"amp_configs has unknown keys {unknown}; it takes 'level', {str(allowed)[1:-1]}.")
    return level, configs
