"""Printing of tables to a terminal or a pipe."""

from __future__ import annotations

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

__all__ = ["print_whole"]

_WIDEST = 1000


def print_whole(console: Console, table: Table) -> None:
    """Print a table in its full width, so that a narrow console does not cut names and numbers."""
    own = console.width
    whole = Measurement.get(console, console.options.update(max_width=_WIDEST), table).maximum
    console.width = max(own, whole)
    console.print(table)
    console.width = own
