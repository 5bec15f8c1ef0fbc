"""The dtype of the numbers of a step, such as a loss scale, a norm or a bias correction.

These numbers are few, so a device computes them in float64 if it has float64. On devices without it (MPS, most Intel
Arc) the dtype is float32, and formulas that would lose digits are written differently.
"""

from __future__ import annotations

import functools

import torch

__all__ = ["has_float64", "in_scalar_dtype", "scalar_dtype"]


@functools.cache
def has_float64(device: torch.device) -> bool:
    """True if a device computes in float64."""
    return torch.xpu.get_device_properties(device).has_fp64 if device.type == "xpu" else device.type != "mps"


def scalar_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype for the numbers of a step on a device."""
    return torch.float64 if has_float64(device) else torch.float32


def in_scalar_dtype(numbers: torch.Tensor) -> torch.Tensor:
    """Convert numbers to the ``scalar_dtype`` of their device."""
    return numbers.double() if has_float64(numbers.device) else numbers.float()
