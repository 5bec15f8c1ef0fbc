"""``halfstep memory``: bytes per parameter for every level and optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.table import Table

    from ..diagnostics.findings.memory import MemoryLine

__all__ = ["command"]


_UNITS = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def _count(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """Return the number that a text such as 7e9, 7b, 350M or 7_000_000_000 means."""
    text = (value or "").lower().replace(",", "")
    try:
        count = float(text.rstrip("kmbt")) * _UNITS.get(text[-1:], 1.0) if value is not None else None
    except ValueError:
        count = 0.0
    if count is not None and not 0 < count < float("inf"):
        raise click.BadParameter(f"{value} must be a number of parameters above 0, such as 7e9 or 7b.", ctx, param)
    return count


@click.command(epilog="Example: halfstep memory --params 7b --optimizer adamw")
@click.option("--params", metavar="NUMBER", callback=_count, help="also print the GiB of a model of so many: 7b or 7e9")
@click.option("--optimizer", metavar="TEXT", help="only optimizers with this in their name")
def command(params: float | None, optimizer: str | None) -> None:
    """Print the bytes per parameter of weights, masters, optimizer state and gradients, and bytes of activations."""
    from rich.console import Console

    from ..diagnostics.findings.memory import ACTIVATIONS, lines
    from .tables import print_whole

    found = [line for line in lines() if (optimizer or "").lower() in line.optimizer.lower()]
    if not found:
        raise click.BadParameter(f"No optimizer of the table has {optimizer!r} in its name.")
    console = Console()
    print_whole(console, _table(found, params))
    console.print("\nBytes of a number that is kept for the backward pass:", highlight=False)
    for level, text in ACTIVATIONS.items():
        console.print(f"  {level}: {text}", highlight=False, soft_wrap=True)


def _table(lines: list[MemoryLine], params: float | None) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("optimizer", "at"):
        table.add_column(name, no_wrap=True)
    for name in ("weight", "master", "state", "grad", "sum", *(["GiB"] if params else [])):
        table.add_column(name, justify="right", no_wrap=True)
    before = ""
    for line in lines:
        sizes = [line.weights, line.masters, line.state, line.gradients, line.total]
        gib = [f"{line.total * params / 2**30:,.1f}"] if params else []
        name = "" if line.optimizer == before else line.optimizer
        table.add_row(name, f"{line.level} {line.dtype}", *(f"{size:g}" for size in sizes), *gib)
        before = line.optimizer
    return table
