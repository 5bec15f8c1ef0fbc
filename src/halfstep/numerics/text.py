"""Tables as text."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

__all__ = ["aligned"]


def aligned(rows: Sequence[Sequence[str]], right: Collection[int]) -> list[str]:
    """The lines of a table, with these columns flush right and the others flush left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(_cells(row, widths, right)).rstrip() for row in rows]


def _cells(row: Sequence[str], widths: Sequence[int], right: Collection[int]) -> Iterator[str]:
    for i, (cell, width) in enumerate(zip(row, widths, strict=True)):
        yield cell.rjust(width) if i in right else cell.ljust(width)
