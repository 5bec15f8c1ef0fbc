"""Counts of calls by op and dtype, as the table that Paddle prints."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch

from ..observe.counted import CountedOp, counting
from .names import list_name

__all__ = ["collect_operator_stats", "disable_operator_stats_collection", "enable_operator_stats_collection"]

_WIDTH = 120
_COLUMNS: dict[torch.dtype | None, int] = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}  # any other: 3


def _columns(counted: Mapping[CountedOp, int]) -> dict[str, list[int]]:
    """Sum the calls of forward passes by Paddle's name of the op and by compute dtype."""
    found: dict[str, list[int]] = {}
    for row, calls in counted.items():
        op = list_name(row.function)
        if not row.backward and (op != "cast" or row.source is not row.dtype):
            found.setdefault(op, [0, 0, 0, 0])[_COLUMNS.get(row.source, 3)] += calls
    return found


def _table(counts: dict[str, list[int]]) -> str:
    title = "<" + " op list ".center(_WIDTH, "-") + ">"
    columns = ("FP16 Calls ---", "BF16 Calls ---", "FP32 Calls---", "Other Calls -->")
    header = "<" + " Op Name ".center(40, "-") + " | " + "-- {} | -- {} | --- {} | -- {}".format(*columns)
    rows = [f"  {op:<40}|" + "|".join(f"  {n:<17}" for n in calls) for op, calls in sorted(counts.items())]
    return "\n".join([title, header, *rows, "<" + f" op count: {len(rows)} ".center(_WIDTH, "-") + ">", ""])


_collecting: list[ExitStack] = []


def enable_operator_stats_collection() -> None:
    """Begin to count the ops that this thread runs, by the dtype that they compute in.

    Counts the ops of forward passes that compute something; views are left out. An op has its name from Paddle's op
    lists, or torch's name if they do not list it; "cast" counts under its source dtype. On a device without 16-bit
    units, where halfstep emulates them, the fp32 kernels that really run are counted. Compiled modules run eagerly.
    """
    if not _collecting:
        _collecting.append(ExitStack())
        _collecting[0].enter_context(collect_operator_stats())


def disable_operator_stats_collection() -> None:
    """End the collection and print its table. Does nothing without a collection."""
    if _collecting:
        _collecting.pop().close()


@contextmanager
def collect_operator_stats() -> Iterator[dict[str, list[int]]]:
    """Count the ops that run in this block, and print the table at its end, even if an error ends the block.

    A nested block, or a block in another thread, counts for itself::

        with amp.debugging.collect_operator_stats():
            loss = model(x)

    Yields:
        A dict that the end of the block fills: op name to calls in float16, bfloat16, float32 and other dtypes.
    """
    watch, counted = counting({})
    counts: dict[str, list[int]] = {}
    try:
        with watch:
            yield counts
    finally:
        counts.update(_columns(counted))
        sys.stdout.write(_table(counts))
