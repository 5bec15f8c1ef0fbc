"""Norms that are written by hand, found by what they compute: a reduction of squares, and then a root."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..core.dtypes import HALF_DTYPES
from ..core.oplists.names import spellings
from ..observe.notes import Notes
from ..observe.ops import FunctionCall

__all__ = ["Root", "Squares", "root_in"]

_REDUCTIONS = frozenset(("mean", "nanmean", "nansum", "sum"))
_VARIANCES = frozenset(("std", "std_mean", "var", "var_mean"))
_ROOTS = frozenset(("rsqrt", "sqrt"))
_CASTS = frozenset(("bfloat16", "contiguous", "double", "float", "half", "reshape", "to", "type", "type_as", "view"))
_KEEP = _CASTS | frozenset((
    *("__getitem__", "abs", "add", "clamp", "clamp_min", "clip", "detach", "div", "expand", "maximum", "mul", "relu"),
    *("squeeze", "sub", "unsqueeze"),
))  # fmt: skip
"""Functions between a statistic and its root. They count only if they leave as many numbers."""


class Squares(NamedTuple):
    """What is known of a tensor: it holds squares, or a statistic, that is, a sum of them.

    Attributes:
        dtype: the 16-bit dtype in which they were computed.
        is_inf: of a statistic, as of ``Root``.
    """

    dtype: torch.dtype
    is_inf: torch.Tensor | None


class Root(NamedTuple):
    """A root that is taken of a statistic.

    Attributes:
        op: the name of the function.
        dtype: the 16-bit dtype in which squares were computed or added up.
        is_inf: tensor of one number: whether the statistic is inf, so that what is divided by it becomes 0.
    """

    op: str
    dtype: torch.dtype
    is_inf: torch.Tensor


def root_in(call: FunctionCall, notes: Notes[Squares]) -> Root | None:
    """The root of a statistic that a call of a function of torch takes; None for any other call.

    Looked for are squares that are computed in 16 bits, then reduced, and then put under a root. torch's own norms
    compute in fp32 inside, and are one function each. Sums of all elements, such as a loss, do not count. Squares of
    bfloat16 that are added up in fp32 do not, either: their roundoff averages out. Those of float16 overflow from 256
    on.

    Args:
        call: any call.
        notes: on the squares and statistics of the calls before, and of this one afterwards.
    """
    function, args, kwargs, result = call
    name = spellings().get(function, (getattr(function, "__name__", ""), False))[0]
    if name in _VARIANCES and isinstance(result, (torch.Tensor, tuple)):
        first = result if isinstance(result, torch.Tensor) else result[0]
        if first.dim() and first.dtype in HALF_DTYPES:
            is_inf = _is_inf(first)
            notes.add(first, Squares(first.dtype, is_inf))
            return Root(name, first.dtype, is_inf) if name.startswith("std") else None
        return None
    if not isinstance(result, torch.Tensor) or not args:
        return None
    exponent = args[1] if name == "pow" and len(args) > 1 else kwargs.get("exponent")
    if name == "square" or exponent == 2 or (name == "mul" and len(args) > 1 and args[0] is args[1]):
        if result.dtype in HALF_DTYPES:
            notes.add(result, Squares(result.dtype, None))
        return None
    found = next(((each, known) for each in args if (known := notes.get(each)) is not None), None)
    if found is None:
        return None
    tensor, known = found
    if known.is_inf is None:
        if name in _REDUCTIONS and result.dim():
            if result.dtype in HALF_DTYPES or known.dtype is torch.float16:
                notes.add(result, known._replace(is_inf=_is_inf(result)))
        elif name in _CASTS:
            notes.add(result, known)
    elif name in _ROOTS or (name == "pow" and exponent in (0.5, -0.5)):
        return Root(name, known.dtype, known.is_inf)
    elif name in _KEEP and result.numel() == tensor.numel():
        notes.add(result, known)
    return None


def _is_inf(statistic: torch.Tensor) -> torch.Tensor:
    return statistic.detach().isinf().any()
