"""The dtype that an op reads its tensors in, and the dtype of its result. Every kind of casting asks for them here.

There are four callers. Eager op casting asks when it builds the table of its rules (``casting.rule_table``), so that a
call costs nothing more. A call that torch has refused, and one that is recorded and runs later, ask for ops of models
that have no lists (``casting.meeting``). The pass over captured graphs asks for each node (``graph.cast_pass``). Each
caller carries out the answer in its own way.

All four also ask about each call that has a number which 16 bits do not have (``needs_fp32``).
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
the first tensor, or the dtype that each has."""

_MOST = 65_504
"""The number of ones whose sum float16 still has."""


def read_in(op: Op, in_place: bool = False) -> str:
    """Return the dtype in which an op reads its fp32 and 16-bit tensors.

    Args:
        op: the row of the op in the lists in force; see ``OpLists.row``.
        in_place: True for the form that writes to its first tensor. ``FLOAT`` means then that it may not write to 16
            bits.
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
        op: as of ``read_in``.
        given: the precision of each tensor as it is given, ``HALF`` or ``FLOAT``; at least one.
        in_place: as of ``read_in``.

    Returns:
        ``HALF``, ``FLOAT`` or, where torch takes them as they are, ``ANY``; and ``HALF`` or ``FLOAT``.
    """
    first, widest = given[0], FLOAT if FLOAT in given else HALF
    read = {WIDEST: widest, FIRST: first}.get(read := read_in(op, in_place), read)
    if in_place:
        return (ANY if read == FLOAT else read), first
    result = (first if op.reads in ("first", "moves") else widest) if read == ANY else read
    return read, FLOAT if op.list == "wide" else result


def refused_row(op: Op, in_place: bool) -> Op:
    """The row of an op in a model that has no lists, where only calls are cast that torch refuses.

    A product is computed in 16 bits there, as everywhere, and an op in place keeps the dtype of its tensor.
    """
    return op._replace(list="free") if in_place else op


@functools.cache
def numbers_kind(op: Op) -> str:
    """The ``numbers`` of a row as the lists in force have it, or "" if a list decides.

    An op on a white list keeps its 16 bits, the user's list or the level's: the list was written for that. The levels
    list ``matmul`` and ``einsum`` for their matrix products, and a sum of these is widened as ``sum`` is. An op whose
    row says nothing has "number" if it takes Python numbers. Products add in fp32.
    """
    if op.list in ("half", "wide"):
        kept = ("mask",) if op.reason in ("custom", "default") else ("mask", "product")
        return op.numbers if op.numbers in kept else ""
    return op.numbers or ("number" if not op.kind and takes_number(op.name) else "")


def needs_fp32(kind: str, half: torch.dtype, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> bool:
    """True if a call of an op that is not in place computes and returns fp32, because 16 bits do not have its numbers.

    Args:
        kind: the ``numbers_kind`` of its row, which is asked for once: this runs where a compiler traces.
        half: the 16-bit dtype that the call reads.
        args: the arguments of the call.
        kwargs: the keyword arguments of the call.
        result: the result of the call in 16 bits, of which only the shape is read, and for "product" alone.
    """
    if kind in ("number", "bound"):
        return any(_is_lost(each, half, kind == "bound") for each in (*args, *kwargs.values()))
    if kind == "accumulate" or half is not torch.float16:
        return kind == "accumulate" and bool(kwargs.get("accumulate", len(args) > 3 and args[3]))
    if kind == "product":
        return _is_sum(args, result)
    return kind == "norm" or (kind == "sum" and _is_large(args, kwargs))


def _is_lost(number: Any, half: torch.dtype, bound: bool) -> bool:
    """True if a Python number becomes 0 or infinite in 16 bits and is not before, or a bound becomes 1 or -1."""
    if not isinstance(number, (int, float)):
        return isinstance(number, complex)
    info, size = torch.finfo(half), abs(number)
    one = bound and size != 1 and 1 - info.eps / 4 <= size <= 1 + info.eps / 2
    return one or 0 < size <= info.smallest_normal * info.eps / 2 or info.max < size < math.inf


def _is_large(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if a sum gives one number, or if each result adds so many that a sum of ones overflows float16."""
    first: Any = args[0] if args else kwargs.get("input")
    dim: Any = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis"))
    dims = (dim,) if isinstance(dim, (int, str)) else dim
    return not dims or not first.dim() or math.prod(first.size(each) for each in dims) > _MOST


def _is_sum(args: Sequence[Any], result: torch.Tensor) -> bool:
    """True if a product gives one number, or adds so many products of elements in the same place, as Dice losses do.

    The tensors of such an einsum have every index of its result. In a matrix product each lacks some.
    """
    if not result.dim() or not args or not isinstance(args[0], str):
        return not result.dim()
    inputs, arrow, output = args[0].replace(" ", "").partition("->")
    tensors = args[1] if isinstance(args[1], (list, tuple)) else args[1:]
    in_place = arrow and all(set(output).issubset(each) for each in inputs.split(","))
    return bool(in_place) and max(map(torch.numel, tensors)) > _MOST * result.numel()
