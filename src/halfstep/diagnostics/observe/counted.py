"""Counts of ops as they run: ``op_table`` and operator stats read the same rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn

from ...formats.products import RoundedTo
from .ops import Cast, OpCall, tensors_in
from .watch import CallWatch

__all__ = ["CountedOp", "counting"]


class CountedOp(NamedTuple):
    """The properties that calls of ops share if they are counted together.

    Attributes:
        module: the qualified name of the module.
        op: the name of the op, such as "addmm".
        function: the name of the torch function that runs such an op, such as "linear".
        backward: True if a backward pass called the op.
        source: the compute dtype: the dtype of the first floating argument; for a cast, the source dtype. None without
            a floating argument.
        dtype: the dtype of the first result; None if there is none.
        cast: the cast that the op makes; None for any other op.
        emulates: see ``OpCall``.
    """

    module: str
    op: str
    function: str
    backward: bool
    source: torch.dtype | None
    dtype: torch.dtype | None
    cast: Cast | None
    emulates: torch.dtype | RoundedTo | None


def counting(names: Mapping[nn.Module, str] | None, *, casts: bool = False) -> tuple[CallWatch, Counter[CountedOp]]:
    """Make a watch that counts the ops that compute or copy values; the counts are ordered by first occurrence.

    Args:
        names: see ``CallWatch``.
        casts: see ``CallWatch``.

    Returns:
        The watch, and the counts that it fills.
    """
    counts: Counter[CountedOp] = Counter()

    def notice(call: OpCall) -> None:
        if call.computes:
            counts[_counted(call)] += 1

    return CallWatch(names, ops=notice, casts=casts), counts


def _counted(call: OpCall) -> CountedOp:
    result = call.output
    dtype = None if result is None else result.dtype
    source = call.source.dtype if call.copies else _computes_in(call) or dtype
    return CountedOp(call.module, call.name, call.canonical, call.backward, source, dtype, call.cast, call.emulates)


def _computes_in(call: OpCall) -> torch.dtype | None:
    for value in (*call.args, *call.kwargs.values()):
        tensor = next(tensors_in(value), None)
        if tensor is not None and tensor.is_floating_point():
            return tensor.dtype
    return None
