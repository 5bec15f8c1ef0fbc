"""How many calls of which op ran in which dtype, as the table that Paddle prints."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from ..observe.ops import OpCall, tensors_in
from ..observe.watch import Watch
from .names import list_name, op_of

__all__ = ["collect_operator_stats", "disable_operator_stats_collection", "enable_operator_stats_collection"]

_WIDTH = 120
_COLUMNS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
_OTHER = 3


def _count(counts: dict[str, list[int]], call: OpCall) -> None:
    if call.backward or not call.computes:
        return
    op = list_name(op_of(call))
    dtype = call.source.dtype if op == "cast" else _computes_in(call)
    if op != "cast" or dtype is not call.result.dtype:
        column = _OTHER if dtype is None else _COLUMNS.get(dtype, _OTHER)
        counts.setdefault(op, [0, 0, 0, 0])[column] += 1


def _table(counts: dict[str, list[int]]) -> str:
    title = "<" + " op list ".center(_WIDTH, "-") + ">"
    columns = ("FP16 Calls ---", "BF16 Calls ---", "FP32 Calls---", "Other Calls -->")
    header = "<" + " Op Name ".center(40, "-") + " | " + "-- {} | -- {} | --- {} | -- {}".format(*columns)
    rows = [f"  {op:<40}|" + "|".join(f"  {n:<17}" for n in calls) for op, calls in sorted(counts.items())]
    end = "<" + f" op count: {len(rows)} ".center(_WIDTH, "-") + ">"
    return "\n".join([title, header, *rows, end, ""])


def _computes_in(call: OpCall) -> torch.dtype | None:
    """The dtype of the first floating argument, or where there is none, of the result."""
    for value in (*call.args, *call.kwargs.values(), call.result):
        tensor = next(tensors_in(value), None)
        if tensor is not None and tensor.is_floating_point():
            return tensor.dtype
    result = call.output
    return None if result is None else result.dtype


_collecting: list[tuple[Watch, dict[str, list[int]]]] = []


def enable_operator_stats_collection() -> None:
    """Begin to count the ops that this thread runs, by the dtype that they compute in.

    Counted are the ops of forward passes that compute something: no views. Their names are those of Paddle's op lists
    where the op has one there, torch's otherwise, and "cast" is counted by the dtype before. Where a device has no
    16-bit units and halfstep emulates them, the fp32 kernels that really run are counted. Compiled modules run eagerly.
    """
    if not _collecting:
        counts: dict[str, list[int]] = {}
        _collecting.append((Watch({}, ops=partial(_count, counts)).begin(), counts))


def disable_operator_stats_collection() -> None:
    """End it, and print the table. Without a collection nothing happens."""
    if _collecting:
        watch, counts = _collecting.pop()
        watch.end()
        sys.stdout.write(_table(counts))


@contextmanager
def collect_operator_stats() -> Iterator[dict[str, list[int]]]:
    """Count the ops that run in this block, and print the table at its end, also when an error ends it.

    ::

        with amp.debugging.collect_operator_stats():
            loss = model(x)

    Yields:
        The counts by the name of the op: calls in float16, bfloat16, float32 and others.
    """
    enable_operator_stats_collection()
    try:
        yield _collecting[0][1]
    finally:
        disable_operator_stats_collection()
