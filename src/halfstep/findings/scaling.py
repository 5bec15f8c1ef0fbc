"""Facts about a loss scaler, whoever made it, without a read of the device."""

from __future__ import annotations

from typing import Any

import torch

from ..core.torch_compat import initial_scale
from ..gradients.loss_scaler import DeviceLossScaler

__all__ = ["is_enabled", "kind", "scales"]


def is_enabled(scaler: Any) -> bool:
    """Whether the scaler was not switched off."""
    return isinstance(scaler, DeviceLossScaler) or bool(scaler.is_enabled())


def scales(scaler: Any) -> bool:
    """Whether it ever multiplies a loss by something else than 1."""
    if isinstance(scaler, DeviceLossScaler):
        return not scaler.neutral
    inner = getattr(scaler, "loss_scaler", None)  # of halfstep's
    if isinstance(inner, DeviceLossScaler):
        return bool(scaler.is_enabled()) and not inner.neutral
    moves = scaler.is_enabled() and scaler.get_growth_factor() != 1.0
    return bool(moves) or (scaler.is_enabled() and initial_scale(scaler) != 1.0)


def kind(scaler: Any) -> str:
    """The name of a scaler in messages."""
    if isinstance(scaler, DeviceLossScaler):
        return f"{'dynamic' if scaler.dynamic else 'static'} loss scale of amp.initialize"
    return "torch.amp.GradScaler" if type(scaler) is torch.amp.GradScaler else type(scaler).__name__
