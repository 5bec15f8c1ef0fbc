"""The dtype in which an op reads its tensors, and the dtype of its result, for every kind of casting.

There are four callers. Eager op casting uses these functions when it builds its table of rules
(``casting.rule_table``), so that they cost nothing per call. Retries of refused calls, and recorded calls that run
later, use them for ops of models without op lists (``casting.meeting``). The pass over captured graphs uses them for
each node (``graph.cast_pass``). Each caller carries out the answer in its own way.

All four also check each call for numbers outside the range of 16 bits (``needs_fp32``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .names import takes_number
from .tables import Op

__all__ = ["ANY", "FIRST", "FLOAT", "HALF", "WIDEST", "dtypes", "needs_fp32", "numbers_kind", "read_in", "refused_row"]

HALF, FLOAT, WIDEST, FIRST, ANY = "half", "float", "widest", "first", "any"
"""The dtypes in which a call reads its fp32 and 16-bit tensors: 16 bits, fp32, the widest of their dtypes, the dtype of
the first tensor, or each in its own dtype."""

_MOST = 65_504
"""The largest number of ones whose sum is finite in float16."""


def read_in(op: Op, in_place: bool = False) -> str:
    """Return the dtype in which an op reads its fp32 and 16-bit tensors.

    Args:
        op: the row of the op in the current lists; see ``OpLists.row``.
        in_place: True for the in-place form. ``FLOAT`` then means that the op must not write to a 16-bit tensor.
    """
    if in_place:
        if op.list in ("float", "banned") and op.in_place != "moves":
            return FLOAT
        return ANY if op.in_place == "any" and op.list != "half" else FIRST
    if op.list in ("half", "wide"):
        return HALF
    if op.list in ("float", "banned") or op.kernels == "none":
        return FLOAT
    return WIDEST if op.reads in ("one", "half-first") else ANY


def dtypes(op: Op, given: Sequence[str], in_place: bool = False) -> tuple[str, str]:
    """Return the dtype in which one call reads its fp32 and 16-bit tensors, and the dtype of its result.

    Args:
        op: see ``read_in``.
        given: the precision of each tensor argument, ``HALF`` or ``FLOAT``; at least one.
        in_place: see ``read_in``.

    Returns:
        ``HALF``, ``FLOAT`` or, if torch accepts the tensors as they are, ``ANY``; and ``HALF`` or ``FLOAT``.
    """
    first, widest = given[0], FLOAT if FLOAT in given else HALF
    read = {WIDEST: widest, FIRST: first}.get(read := read_in(op, in_place), read)
    if in_place:
        return (ANY if read == FLOAT else read), first
    result = (first if op.reads in ("first", "moves") else widest) if read == ANY else read
    return read, FLOAT if op.list == "wide" else result


def refused_row(op: Op, in_place: bool) -> Op:
    """Return the row of an op in a model without op lists, in which only calls that torch refuses are cast.

    Products still compute in 16 bits, and an in-place op keeps the dtype of its tensor.
    """
    return op._replace(list="free") if in_place else op


@functools.cache
def numbers_kind(op: Op) -> str:
    """Return the ``numbers`` of a row in the current lists, or "" if a list decides.

    An op on a white list, the user's or the level's, stays in 16 bits, because that is the purpose of the list. But
    the levels list ``matmul`` and ``einsum`` for their matrix products, so a call of these that computes a sum is
    widened like ``sum``. An op whose row has no entry gets "number" if it takes Python numbers; products do not,
    because they accumulate in fp32.
    """
    if op.list in ("half", "wide"):
        kept = ("mask",) if op.reason in ("custom", "default") else ("mask", "product")
        return op.numbers if op.numbers in kept else ""
    return op.numbers or ("number" if not op.kind and takes_number(op.name) else "")


def needs_fp32(kind: str, half: torch.dtype, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> bool:
    """True if an out-of-place call computes and returns fp32, because its numbers are out of range in 16 bits.

    Args:
        kind: the ``numbers_kind`` of the op's row, which the caller looks up once because compilers trace this
            function.
        half: the 16-bit dtype that the call reads.
        args: the arguments of the call.
        kwargs: the keyword arguments of the call.
        result: the result of the call in 16 bits; only "product" reads it, and only its shape.
    """
    if kind in ("number", "bound", "eps"):
        return any(_is_lost(each, half, kind) for each in (*args, *kwargs.values()))
    if kind == "accumulate" or half is not torch.float16:
        return kind == "accumulate" and bool(kwargs.get("accumulate", len(args) > 3 and args[3]))
    if kind == "product":
        return _is_sum(args, result)
    return kind == "norm" or (kind == "sum" and _is_large(args, kwargs))


def _is_lost(number: Any, half: torch.dtype, kind: str) -> bool:
    """True if rounding to 16 bits turns a nonzero finite number into 0 or infinity, or a bound into 1 or -1.

    The ``eps`` of ``logit`` is a distance from 0 and from 1: its bound is ``1 - eps``.
    """
    if not isinstance(number, (int, float)):
        return isinstance(number, complex)
    info, size = torch.finfo(half), abs(1 - number if kind == "eps" else number)
    one = kind != "number" and size != 1 and 1 - info.eps / 4 <= size <= 1 + info.eps / 2
    return one or 0 < size <= info.smallest_normal * info.eps / 2 or info.max < size < math.inf


def _is_large(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if a sum has one result, or adds so many elements per result that a sum of ones overflows float16."""
    first: Any = args[0] if args else kwargs.get("input")
    dim: Any = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis"))
    dims = (dim,) if isinstance(dim, (int, str)) else dim
    return not dims or not first.dim() or math.prod(first.size(each) for each in dims) > _MOST


def _is_sum(args: Sequence[Any], result: torch.Tensor) -> bool:
    """True if a product has one result, or is an elementwise product with a long sum, as in Dice losses.

    In such an einsum every operand has all indices of the result; in a matrix product each operand lacks some.
    """
    if not result.dim() or not args or not isinstance(args[0], str):
        return not result.dim()
    inputs, arrow, output = args[0].replace(" ", "").partition("->")
    tensors = args[1] if isinstance(args[1], (list, tuple)) else args[1:]
    in_place = arrow and all(set(output).issubset(each) for each in inputs.split(","))
    return bool(in_place) and max(map(torch.numel, tensors)) > _MOST * result.numel()
