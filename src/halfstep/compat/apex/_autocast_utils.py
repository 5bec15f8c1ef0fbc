"""``apex._autocast_utils``: the casts that Apex's functions applied to their arguments under torch's autocast."""

from __future__ import annotations

from typing import Any

import torch

from ...casting.containers import map_tensors

__all__: list[str] = []


def _cast_if_autocast_enabled(*args: Any) -> Any:
    """Cast floating arguments, except float64, to the autocast dtype if autocast is enabled for their device."""
    return map_tensors(_cast, args)


def _cast(tensor: torch.Tensor) -> torch.Tensor:
    device = tensor.device.type
    cast = tensor.is_floating_point() and tensor.dtype is not torch.float64 and torch.is_autocast_enabled(device)
    return tensor.to(torch.get_autocast_dtype(device)) if cast else tensor


def _get_autocast_dtypes() -> list[torch.dtype]:
    """Return the dtypes that autocast may compute in."""
    return [torch.half, torch.bfloat16]


def _get_current_dtype(dtype: torch.dtype | None = None) -> torch.dtype:
    """Return the autocast dtype for CUDA if autocast is enabled; else ``dtype``, or float32."""
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else dtype or torch.float32
