"""The tables of docs/side-effects.md on what halfstep leaves elsewhere, and what differs from them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

__all__ = ["differences", "rows_of"]

PAGE = Path(__file__).parents[2] / "docs" / "side-effects.md"

Row = tuple[str, ...]
"""The cells of a row but the last."""


def rows_of(title: str, text: str | None = None) -> dict[Row, str]:
    """The table below a heading: its rows, without code marks, and the last cell of each, which says why."""
    text = PAGE.read_text() if text is None else text
    section = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", text, re.DOTALL | re.MULTILINE)
    assert section is not None, f"docs/side-effects.md has no section {title!r}"
    lines = [line for line in section[1].splitlines() if line.startswith("| ")][1:]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    rows = {tuple(cell.replace("`", "") for cell in row[:-1]): row[-1] for row in cells}
    assert len(rows) == len(cells), f"{title}: two rows of docs/side-effects.md are of one thing"
    return rows


def differences(title: str, found: Iterable[Row], text: str | None = None) -> list[str]:
    """A sentence for each thing without a row, for each row whose thing is not there, and for each without a reason."""
    rows, there = rows_of(title, text), set(found)
    table = f"the table {title!r} of docs/side-effects.md"
    new = [f"{' '.join(x)} is not in {table}: do without it, or add a row that says why." for x in there - set(rows)]
    gone = [f"row {' '.join(x)} of {table} names something that is not there any more." for x in set(rows) - there]
    bare = [f"row {' '.join(x)} of {table} gives no reason." for x, why in rows.items() if not why.endswith(".")]
    return sorted(new) + sorted(gone) + bare
