"""Numbers that 16 bits do not have, such as a mask's -1e10: a plain cast makes infinities of them.

A row that is hidden by finite numbers has a softmax. One that is hidden by infinities is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ..core.dtypes import HALF_DTYPES
from .containers import tensors_in
from .dispatch import CastMode, Rule, note_meeting
from .rules import to_float

__all__ = ["ATTENTION", "FILLS", "finite_fill", "finite_mask", "finite_number", "narrow_finite"]

ATTENTION = "scaled_dot_product_attention"
"""The op that takes an additive mask."""

FILLS = ("masked_fill", "index_fill", "fill")
"""Ops that write one number to many places: their last argument."""


def narrow_finite(tensor: torch.Tensor, half: torch.dtype) -> torch.Tensor:
    """A tensor in 16 bits, in which finite numbers stay finite."""
    limits = torch.finfo(half)
    return torch.where(tensor.isinf(), tensor, tensor.clamp(limits.min, limits.max)).to(half)


def finite_number(
    otherwise: Rule | None, mode: CastMode, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> Any:
    """``where(mask, scores, -1e10)`` or ``masked_fill`` in fp32 if 16 bits do not have the number.

    Torch would refuse it or write an infinity, and a row that is hidden whole would be NaN.
    """
    limits = [torch.finfo(t.dtype).max for t in tensors_in(args, kwargs) if t.dtype in HALF_DTYPES and mode.casts(t)]
    numbers = [abs(a) for a in (*args, *kwargs.values()) if isinstance(a, float) and math.isfinite(a)]
    if limits and numbers and max(numbers) > min(limits):
        note_meeting()
        return to_float("where", mode, func, args, kwargs)
    return func(*args, **kwargs) if otherwise is None else otherwise(mode, func, args, kwargs)


def finite_fill(otherwise: Rule, mode: CastMode, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """``x[mask] = -1e10`` and fills in place: the nearest number that 16 bits have is written.

    Torch would refuse it or write an infinity.
    """
    target, number = args[0] if args else None, kwargs.get("value", args[-1] if args else None)
    if isinstance(number, (int, float)) and isinstance(target, torch.Tensor) and target.dtype in HALF_DTYPES:
        limit = torch.finfo(target.dtype).max
        if limit < abs(number) < math.inf and mode.casts(target):
            note_meeting()
            number = limit if number > 0 else -limit
            if "value" in kwargs:
                kwargs = {**kwargs, "value": number}
            else:
                args = (*args[:-1], number)
    return otherwise(mode, func, args, kwargs)


def finite_mask(otherwise: Rule, mode: CastMode, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Attention in 16 bits: the finite numbers of an fp32 mask stay finite.

    A mask of ``torch.finfo(torch.float32).min`` would be -inf in 16 bits, and a row that it hides whole NaN.
    """
    place = 3
    mask: Any = args[place] if len(args) > place else kwargs.get("attn_mask")
    half = mode.half_of(mask) if isinstance(mask, torch.Tensor) and mask.dtype is torch.float32 else None
    if half is not None:
        mask = narrow_finite(mask, half)
        if len(args) > place:
            args = (*args[:place], mask, *args[place + 1 :])
        else:
            kwargs = {**kwargs, "attn_mask": mask}
    return otherwise(mode, func, args, kwargs)
