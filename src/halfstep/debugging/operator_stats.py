"""How many calls of which op ran in which dtype, as the table that Paddle prints."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..observe.ops import OpCall, first_tensor
from ..observe.watch import Watch
from .names import list_name, op_of

__all__ = ["collect_operator_stats", "disable_operator_stats_collection", "enable_operator_stats_collection"]

_WIDTH = 120
_COLUMNS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
_OTHER = 3


class _Collection:
    """The calls since it began."""

    def __init__(self) -> None:
        self.counts: dict[str, list[int]] = {}
        self.watch = Watch({}, ops=self._count)

    def _count(self, call: OpCall) -> None:
        if call.backward or not call.computes:
            return
        op = list_name(op_of(call))
        dtype = call.source.dtype if op == "cast" else _computes_in(call)
        if op == "cast" and dtype is call.result.dtype:
            return
        self.counts.setdefault(op, [0, 0, 0, 0])[_OTHER if dtype is None else _COLUMNS.get(dtype, _OTHER)] += 1

    def table(self) -> str:
        title = "<" + " op list ".center(_WIDTH, "-") + ">"
        columns = ("FP16 Calls ---", "BF16 Calls ---", "FP32 Calls---", "Other Calls -->")
        header = "<" + " Op Name ".center(40, "-") + " | " + "-- {} | -- {} | --- {} | -- {}".format(*columns)
        rows = [
            f"  {op:<40}|" + "|".join(f"  {count:<17}" for count in counts)
            for op, counts in sorted(self.counts.items())
        ]
        end = "<" + f" op count: {len(rows)} ".center(_WIDTH, "-") + ">"
        return "\n".join([title, header, *rows, end, ""])


def _computes_in(call: OpCall) -> torch.dtype | None:
    """The dtype of the first floating argument, or where there is none, of the result."""
    for value in (*call.args, *call.kwargs.values(), call.result):
        tensor: Any = first_tensor(value)
        if tensor is not None and tensor.is_floating_point():
            return tensor.dtype  # type: ignore[no-any-return]
    result = call.output
    return None if result is None else result.dtype


_collecting: list[_Collection] = []


def enable_operator_stats_collection() -> None:
    """Begin to count the ops that this thread runs, by the dtype that they compute in.

    Counted are the ops of forward passes that compute something: no views. Their names are those of Paddle's op lists
    where the op has one there, torch's otherwise, and "cast" is counted by the dtype before. Where a device has no
    16-bit units and halfstep emulates them, the fp32 kernels that really run are counted. Compiled modules run eagerly.
    """
    if _collecting:
        return
    _collecting.append(_Collection())
    _collecting[0].watch.begin()


def disable_operator_stats_collection() -> None:
    """End it, and print the table. Without a collection nothing happens."""
    if not _collecting:
        return
    collection = _collecting.pop()
    collection.watch.end()
    sys.stdout.write(collection.table())


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
        yield _collecting[0].counts
    finally:
        disable_operator_stats_collection()
