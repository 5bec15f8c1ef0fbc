"""Casts to 16 bits of numbers that a plain cast would destroy."""

from __future__ import annotations

import torch

from ..core.dtypes import HALF_DTYPES

__all__ = ["to_finite"]


def to_finite(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A floating tensor in another dtype, in which finite numbers stay finite.

    A mask of ``torch.finfo(torch.float32).min`` would be -inf in 16 bits, and the softmax of a row that it hides whole
    would be NaN.
    """
    if tensor.dtype is dtype or dtype not in HALF_DTYPES or tensor.dtype in HALF_DTYPES:
        return tensor.to(dtype)
    info = torch.finfo(dtype)
    return torch.where(tensor.isinf(), tensor, tensor.clamp(info.min, info.max)).to(dtype)
