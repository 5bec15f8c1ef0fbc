"""Tables in a terminal or a pipe."""

from __future__ import annotations

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

__all__ = ["print_whole"]

_WIDEST = 1000


def print_whole(console: Console, table: Table) -> None:
    """Print a table as wide as it is: names and numbers are not cut where the console is narrower."""
    own = console.width
    whole = Measurement.get(console, console.options.update(max_width=_WIDEST), table).maximum
    console.width = max(own, whole)
    console.print(table)
    console.width = own
