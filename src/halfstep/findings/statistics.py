"""Norms that are written by hand, found by what they compute: a reduction of squares, and then a root."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch

from ..core.dtypes import HALF_DTYPES
from ..core.oplists.names import spellings
from ..observe.ops import FunctionCall

__all__ = ["Root", "Statistics"]

_REDUCTIONS = frozenset(("mean", "nanmean", "nansum", "sum"))
_VARIANCES = frozenset(("std", "std_mean", "var", "var_mean"))
_ROOTS = frozenset(("rsqrt", "sqrt"))
_CASTS = frozenset(("bfloat16", "contiguous", "double", "float", "half", "reshape", "to", "type", "type_as", "view"))
_KEEP = _CASTS | frozenset((
    *("__getitem__", "abs", "add", "clamp", "clamp_min", "clip", "detach", "div", "expand", "maximum", "mul", "relu"),
    *("squeeze", "sub", "unsqueeze"),
))  # fmt: skip
"""Functions between a statistic and its root. They count only if they leave as many numbers."""


class _Known(NamedTuple):
    tensor: weakref.ref[torch.Tensor]
    dtype: torch.dtype
    is_inf: torch.Tensor | None  # of a statistic


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


class Statistics:
    """A search for squares that are computed in 16 bits, then reduced, and then put under a root.

    torch's own norms compute in fp32 inside, and are one function each. Sums of all elements, such as a loss, do not
    count. Squares of bfloat16 that are added up in fp32 do not, either: their roundoff averages out. Those of float16
    overflow from 256 on.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def see(self, call: FunctionCall) -> Root | None:
        """Look at one call of a function of torch. Returns the ``Root``, if the call was one of such a statistic."""
        function, args, kwargs, result = call
        name = spellings().get(function, (getattr(function, "__name__", ""), False))[0]
        if name in _VARIANCES and isinstance(result, (torch.Tensor, tuple)):
            first = result if isinstance(result, torch.Tensor) else result[0]
            if first.dim() and first.dtype in HALF_DTYPES:
                is_inf = _is_inf(first)
                self._note(first, first.dtype, is_inf)
                return Root(name, first.dtype, is_inf) if name.startswith("std") else None
            return None
        if not isinstance(result, torch.Tensor) or not args:
            return None
        exponent = args[1] if name == "pow" and len(args) > 1 else kwargs.get("exponent")
        if name == "square" or exponent == 2 or (name == "mul" and len(args) > 1 and args[0] is args[1]):
            if result.dtype in HALF_DTYPES:
                self._note(result, result.dtype, None)
            return None
        found = next(((each, known) for each in args if (known := self._get(each)) is not None), None)
        if found is None:
            return None
        tensor, known = found
        if known.is_inf is None:
            if name in _REDUCTIONS and result.dim():
                if result.dtype in HALF_DTYPES or known.dtype is torch.float16:
                    self._note(result, known.dtype, _is_inf(result))
            elif name in _CASTS:
                self._note(result, known.dtype, None)
        elif name in _ROOTS or (name == "pow" and exponent in (0.5, -0.5)):
            return Root(name, known.dtype, known.is_inf)
        elif name in _KEEP and result.numel() == tensor.numel():
            self._note(result, known.dtype, known.is_inf)
        return None

    def _note(self, tensor: torch.Tensor, dtype: torch.dtype, is_inf: torch.Tensor | None) -> None:
        self._known[id(tensor)] = _Known(weakref.ref(tensor), dtype, is_inf)

    def _get(self, value: Any) -> _Known | None:
        known = self._known.get(id(value))
        return known if known is not None and known.tensor() is value else None


def _is_inf(statistic: torch.Tensor) -> torch.Tensor:
    return statistic.detach().isinf().any()
