"""Rules for values outside the range of 16 bits, such as an eps of 1e-8, a mask's -1e10, or a sum of many ones in
float16.

A plain cast turns these values into zeros and infinities, which then divide by 0, or mask a whole row so that its
softmax is NaN. So the call computes in fp32 (``core.oplists.dtypes.needs_fp32``), and a call that writes to a 16-bit
tensor writes the nearest finite values.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..core.dtypes import HALF_DTYPES
from ..core.oplists.dtypes import FLOAT, needs_fp32, numbers_kind, read_in
from ..core.oplists.tables import Op
from ..torch_internals.compiler_compat import is_traced
from ..torch_internals.torch_compat import DisableTorchDispatch, dispatch_mode_count, has_recording_mode
from .containers import map_tensors, tensors_in
from .dispatch import CastMode, Rule, count_changed_op
from .rules import bind, to_float, without_native

__all__ = ["finite_rule", "narrow_finite", "write_in_fp32"]

_FILLS = ("where", "masked_fill", "index_fill", "fill", "__setitem__")


def narrow_finite(tensor: torch.Tensor, half: torch.dtype, traced: bool | None = None) -> torch.Tensor:
    """Cast a tensor to 16 bits, clamping finite values so that they stay finite; infinities, as in masks, are kept.

    On a CPU it is faster to check the range first and clamp only if needed, with the same result. While ops are
    recorded the check is skipped, because the recorded ops may later run on other values.

    Args:
        tensor: a floating tensor.
        half: the 16-bit dtype.
        traced: the result of ``is_traced``, if the caller has computed it; None computes it here.
    """
    limits = torch.finfo(half)
    recorded = (is_traced() if traced is None else traced) or (dispatch_mode_count() and has_recording_mode())
    if type(tensor) is torch.Tensor and tensor.is_cpu and not recorded and tensor.numel():
        with DisableTorchDispatch():  # hides the check from dispatch modes that watch the user's ops
            lowest, highest = tensor.detach().aminmax()
        if limits.min <= float(lowest) and float(highest) <= limits.max:  # False for NaN
            return tensor.to(half)
    return torch.where(tensor.isinf(), tensor, tensor.clamp(limits.min, limits.max)).to(half)


def finite_rule(op: Op, in_place: bool, otherwise: Rule | None, recorded: bool) -> Any:
    """Return the rule of an op that checks its numbers first.

    Args:
        op: the row of the op in the current lists.
        in_place: True for the in-place form of the op.
        otherwise: the rule of a call whose numbers are in the range of 16 bits; None calls the op unchanged.
        recorded: True to ignore integers except in fills, because integers in traced code may be sizes.

    Returns:
        A ``Rule`` or ``ByNumbers``; ``otherwise`` for an op without numbers.
    """
    kind = numbers_kind(op)
    if not kind or (read_in(op) == FLOAT and not in_place):
        return otherwise
    if kind == "mask":
        return otherwise and bind(_with_finite_mask, op.list == "half", otherwise)
    if kind == "product":
        return bind(_sum_of_products, op.name, otherwise)
    rule = bind(_in_fp32, op.name, kind, in_place, otherwise)
    kinds = (float, complex) if recorded and op.name not in _FILLS else (float, int, complex)
    return (rule, otherwise, kinds, 2 * (op.name == "__setitem__")) if kind in ("number", "bound") else rule


def _in_fp32(
    name: str, kind: str, in_place: bool, otherwise: Rule | None, mode: CastMode, func: Any, args: Any, kwargs: Any
) -> Any:
    """Compute in fp32 if a number is out of range in 16 bits, and return fp32 unless the call writes to a tensor."""
    target = args[0] if in_place and args else kwargs.get("out")
    given = (*args, *kwargs.values()) if target is None else [target]
    tensors = [each for each in given if isinstance(each, torch.Tensor)] or tensors_in(given)
    halves = {tensor.dtype for tensor in tensors if mode.casts(tensor)}.intersection(HALF_DTYPES)
    if not any(needs_fp32(kind, half, args, kwargs, None) for half in halves):
        return func(*args, **kwargs) if otherwise is None else otherwise(mode, func, args, kwargs)
    count_changed_op()
    if target is not None:
        return write_in_fp32(mode, func, target, args, kwargs)
    return bind(to_float, name, native_off=True)(mode, func, args, kwargs)


def _sum_of_products(name: str, otherwise: Rule | None, mode: CastMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Run a product in 16 bits, and again in fp32 if its result is a sum that may overflow float16."""
    result = func(*args, **kwargs) if otherwise is None else otherwise(mode, func, args, kwargs)
    if result.dtype is not torch.float16 or not needs_fp32("product", result.dtype, args, kwargs, result):
        return result
    count_changed_op()
    return bind(to_float, name, native_off=True)(mode, func, args, kwargs)


def write_in_fp32(mode: CastMode, func: Any, target: torch.Tensor, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call an op that writes to a 16-bit tensor on an fp32 copy, so that finite values stay finite in the tensor."""
    wide, most = target.float(), torch.finfo(torch.float32).max

    def widened(value: Any) -> Any:
        if isinstance(value, (int, float)) and most < abs(value) < math.inf:  # would overflow fp32 as well
            return math.copysign(most, value)
        return map_tensors(lambda t: wide if t is target else t.float() if t.dtype in HALF_DTYPES else t, value)

    args, kwargs = [widened(each) for each in args], {key: widened(each) for key, each in kwargs.items()}
    result = without_native(mode, func, args, kwargs)
    if target.shape != wide.shape:  # an empty tensor for `out=`
        target.resize_(wide.shape)
    target.copy_(narrow_finite(wide, target.dtype))
    return target if result is wide else result


def _with_finite_mask(lowers: bool, otherwise: Rule, mode: CastMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Run attention with finite values of an fp32 mask kept finite, if it runs in 16 bits (``lowers`` or its query).

    A mask value of ``torch.finfo(torch.float32).min`` would become -inf in 16 bits, and a fully masked row NaN.
    """
    mask: Any = args[3] if len(args) > 3 else kwargs.get("attn_mask")
    half = mode.half_of(mask) if isinstance(mask, torch.Tensor) and mask.dtype is torch.float32 else None
    if half is not None and (lowers or (args[0] if args else kwargs["query"]).dtype in HALF_DTYPES):
        finite = narrow_finite(mask, half)
        args, kwargs = map_tensors(lambda tensor: finite if tensor is mask else tensor, (args, kwargs))
    return otherwise(mode, func, args, kwargs)
