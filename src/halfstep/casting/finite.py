"""Numbers that 16 bits do not have, such as a mask's -1e10: a plain cast makes infinities of them.

A row that is hidden by finite numbers has a softmax. One that is hidden by infinities is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ..core.dtypes import HALF_DTYPES
from ..torch_internals.compiler_compat import is_traced
from ..torch_internals.torch_compat import DisableTorchDispatch, dispatch_mode_count, has_recording_mode
from .containers import tensors_in
from .dispatch import CastMode, Rule, note_meeting
from .rules import to_float

__all__ = ["ATTENTION", "FILLS", "finite_fill", "finite_mask", "finite_number", "narrow_finite"]

ATTENTION = "scaled_dot_product_attention"
"""The op that takes an additive mask."""

FILLS = ("masked_fill", "index_fill", "fill")
"""Ops that write one number to many places: their last argument."""


def narrow_finite(tensor: torch.Tensor, half: torch.dtype, traced: bool | None = None) -> torch.Tensor:
    """A tensor in 16 bits, in which finite numbers stay finite. Infinities stay infinite: masks hide with -inf.

    The result does not depend on the look at the range, which is quicker on a CPU. Where ops are recorded it is left
    out, because later values may be others.

    Args:
        tensor: a floating tensor.
        half: the 16-bit dtype.
        traced: what ``is_traced`` says, for who has asked it; None asks.
    """
    limits = torch.finfo(half)
    recorded = (is_traced() if traced is None else traced) or (dispatch_mode_count() and has_recording_mode())
    if type(tensor) is torch.Tensor and tensor.is_cpu and not recorded and tensor.numel():
        with DisableTorchDispatch():  # a mode that watches the user's ops does not see the look
            lowest, highest = tensor.detach().aminmax()
        if limits.min <= float(lowest) and float(highest) <= limits.max:  # False for NaN
            return tensor.to(half)
    return torch.where(tensor.isinf(), tensor, tensor.clamp(limits.min, limits.max)).to(half)


def _is_beyond(number: Any, half: Any) -> bool:
    """Whether something is a finite number, integer or not, that a 16-bit dtype does not have."""
    return isinstance(number, (int, float)) and torch.finfo(half).max < abs(number) < math.inf


def finite_number(
    otherwise: Rule | None, mode: CastMode, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> Any:
    """``where(mask, scores, -1e10)`` or ``masked_fill`` in fp32 if 16 bits do not have the number.

    Torch would refuse it or write an infinity, and a row that is hidden whole would be NaN.
    """
    halves = {t.dtype for t in tensors_in(args, kwargs) if t.dtype in HALF_DTYPES and mode.casts(t)}
    if any(_is_beyond(each, half) for half in halves for each in (*args, *kwargs.values())):
        note_meeting()
        return to_float("where", mode, func, args, kwargs)
    return func(*args, **kwargs) if otherwise is None else otherwise(mode, func, args, kwargs)


def finite_fill(otherwise: Rule, mode: CastMode, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """``x[mask] = -1e10`` and fills in place: the nearest number that 16 bits have is written.

    Torch would refuse it or write an infinity.
    """
    target: Any = args[0] if args else None
    number: Any = kwargs.get("value", args[-1] if args else None)
    half = target.dtype if isinstance(target, torch.Tensor) else None
    if half in HALF_DTYPES and _is_beyond(number, half) and mode.casts(target):
        note_meeting()
        limits = torch.finfo(half)
        number = max(limits.min, min(number, limits.max))
        args, kwargs = (args, {**kwargs, "value": number}) if "value" in kwargs else ((*args[:-1], number), kwargs)
    return otherwise(mode, func, args, kwargs)


def finite_mask(
    lowers: bool, otherwise: Rule, mode: CastMode, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> Any:
    """Attention in 16 bits, as ``lowers`` or its query says: the finite numbers of an fp32 mask stay finite.

    A mask of ``torch.finfo(torch.float32).min`` would be -inf in 16 bits, and a row that it hides whole NaN.
    """
    place = 3
    mask: Any = args[place] if len(args) > place else kwargs.get("attn_mask")
    half = mode.half_of(mask) if isinstance(mask, torch.Tensor) and mask.dtype is torch.float32 else None
    query: Any = args[0] if args else kwargs.get("query")
    if half is not None and (lowers or query.dtype in HALF_DTYPES):
        mask = narrow_finite(mask, half)
        if len(args) > place:
            args = (*args[:place], mask, *args[place + 1 :])
        else:
            kwargs = {**kwargs, "attn_mask": mask}
    return otherwise(mode, func, args, kwargs)
