"""Tables as text."""

from __future__ import annotations

from collections.abc import Collection, Sequence

__all__ = ["aligned"]


def aligned(rows: Sequence[Sequence[str]], right: Collection[int]) -> list[str]:
    """Format the lines of a table; the columns in ``right`` are right-aligned, all other columns left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def filled(i: int, cell: str) -> str:
        return cell.rjust(widths[i]) if i in right else cell.ljust(widths[i])

    return ["  ".join(filled(i, cell) for i, cell in enumerate(row)).rstrip() for row in rows]
