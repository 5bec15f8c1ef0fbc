"""``halfstep demo``: train at every opt level side by side, print one table, write one page."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..files import check_writable

if TYPE_CHECKING:
    from rich.console import Console

    from .training import Run, Settings

__all__ = ["command"]

_NEEDED = {"sklearn": "scikit-learn", "matplotlib": "matplotlib", "jinja2": "jinja2"}


def _parse_levels(ctx: click.Context, param: click.Parameter, value: str) -> list[str]:
    levels = [level.strip().upper() for level in value.split(",")]
    allowed = ("O0", "O1", "O2", "O3")
    if not set(levels) <= set(allowed) or len(set(levels)) < len(levels):
        raise click.BadParameter(f"{value!r}: give some of {','.join(allowed)}, each once, with a comma between.")
    return levels


@click.command()
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="where to train  [default: cuda if there is one]")
@click.option(
    "--dtype", type=click.Choice(["float16", "bfloat16"]), help="above O0  [default: float16 on cuda, bfloat16 on cpu]"
)
@click.option("--levels", callback=_parse_levels, default="O0,O1,O2,O3", show_default=True, help="which to train")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("halfstep-demo"),
    show_default=True,
    help="folder for report.html",
)
@click.option("--epochs", type=click.IntRange(1), default=8, show_default=True, help="passes over 1,437 images")
@click.option("--width", type=click.IntRange(8), default=64, show_default=True, help="channels of the first layer")
@click.option("--seed", type=int, default=0, show_default=True, help="seed of initial weights and data order")
def command(
    device: str | None, dtype: str | None, levels: list[str], out: Path, epochs: int, width: int, seed: int
) -> None:
    """Train a convolutional classifier on scikit-learn's digits at every opt level, side by side.

    Prints one table and writes report.html with loss curves and loss scales.
    """
    missing = [package for module, package in _NEEDED.items() if find_spec(module) is None]
    if missing:
        raise click.ClickException(f"The demo also needs {', '.join(missing)}: pip install 'halfstep[demo]'")

    import torch
    from rich.console import Console

    from halfstep.core.dtypes import default_half, parse_dtype
    from halfstep.core.hardware import slow_reason

    from .report import write_report
    from .training import Settings

    check_writable(out / "report.html")
    if device == "cuda" and not torch.cuda.is_available():
        raise click.ClickException("torch finds no CUDA device here; leave out --device cuda to train on the CPU.")
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    half = parse_dtype(dtype) if dtype else default_half(where)
    note = slow_reason(where, half)
    notes = [note] if note else []
    settings = Settings(levels, where, half, epochs, seed, width)

    console = Console()
    for sentence in notes:
        console.print(sentence, style="yellow")
    runs = _train(console, settings)
    _print_table(console, runs)
    out.mkdir(parents=True, exist_ok=True)
    write_report(out / "report.html", runs, settings, notes)
    console.print(f"Loss curves and loss scales: {out / 'report.html'}", soft_wrap=True)


def _train(console: Console, settings: Settings) -> list[Run]:
    """Train under a progress bar."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from .training import EPOCH_STEPS, train

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        steps = len(settings.levels) * settings.epochs * EPOCH_STEPS
        task = progress.add_task("training", total=steps)
        return train(settings, lambda level: progress.update(task, advance=1, description=f"training at {level}"))


def _print_table(console: Console, runs: list[Run]) -> None:
    from rich import box
    from rich.table import Table

    from .report import summarize

    header, rows = summarize(runs)
    table = Table(box=box.SIMPLE, pad_edge=False)
    for i, name in enumerate(header):
        # A header of two words stands on two lines: the table then fits 80 columns.
        table.add_column("\n".join(name.split(" ", 1)), justify="left" if i < 2 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)
