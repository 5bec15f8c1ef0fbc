"""The dtype of the numbers of a step, such as a loss scale, a norm or a bias correction.

These numbers are few. So a device computes them in float64, if it has float64. Some devices do not (MPS, most Intel
Arc). There the dtype is float32, and formulas that would lose digits are written in another way.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from .torch_compat import dispatch_mode_count

__all__ = ["has_float64", "in_scalar_dtype", "on_host", "one_minus_power", "scalar_dtype"]

_FEW = 64  # numbers: they are read faster than an op computes with them


@functools.cache
def has_float64(device: torch.device) -> bool:
    """Whether a device computes in float64."""
    if device.type == "xpu":
        return bool(torch.xpu.get_device_properties(device).has_fp64)
    return device.type != "mps"


def scalar_dtype(device: torch.device) -> torch.dtype:
    """The dtype for the numbers of a step on a device."""
    return torch.float64 if has_float64(device) else torch.float32


def in_scalar_dtype(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers in the ``scalar_dtype`` of their device."""
    return numbers.double() if has_float64(numbers.device) else numbers.float()


def on_host(numbers: torch.Tensor) -> float | torch.Tensor:
    """The one value of a few numbers that lie in host memory and are all the same; any others as they are.

    An op on a small tensor costs the host as much as fifty on a float. Where ops are recorded or compiled numbers stay
    tensors, so that their later values are used, too.
    """
    repeated = dispatch_mode_count() or torch.compiler.is_compiling()
    if type(numbers) is torch.Tensor and numbers.device.type == "cpu" and numbers.numel() <= _FEW and not repeated:
        values = {numbers.item()} if numbers.dim() == 0 else set(numbers.tolist())
        if len(values) == 1:
            return values.pop()
    return numbers


def one_minus_power(beta: float, t: float | torch.Tensor) -> Any:
    """``1 - beta ** t``, where ``t`` is a float or in a ``scalar_dtype``."""
    if not isinstance(t, torch.Tensor) or t.dtype is torch.float64 or not 0.0 < beta < 1.0:
        return 1.0 - beta**t
    return -torch.expm1(t * math.log(beta))  # 1 - 0.999 ** 1 has four digits in float32
