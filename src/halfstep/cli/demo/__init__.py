"""``halfstep demo``: train at every opt level side by side, print one table, write one page."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...core.text import install_line
from ..files import check_writable

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from .training import DemoRun, DemoSettings

__all__ = ["command"]


_LEVELS, _ALL = "O0,O1,O2,O3", "default: all four"
_DTYPE = "above O0; O2 is trained in the other one, too  [default: float16 on cuda, bfloat16 on cpu]"
_FOLDER = click.Path(file_okay=False, path_type=Path)


def _parse_levels(ctx: click.Context, param: click.Parameter, value: str) -> list[str]:
    levels = [level.strip().upper() for level in value.split(",")]
    if not set(levels) <= set(_LEVELS.split(",")) or len(set(levels)) < len(levels):
        raise click.BadParameter(f"{value!r}: give some of {_LEVELS}, each once, with a comma between.")
    return levels


@click.command(context_settings={"show_default": True}, epilog="Example: halfstep demo --levels O0,O2 --epochs 2")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="where to train  [default: cuda if there is one]")
@click.option("--dtype", type=click.Choice(["float16", "bfloat16"]), help=_DTYPE)
@click.option("--levels", "--opt-levels", callback=_parse_levels, default=_LEVELS, show_default=False, help=_ALL)
@click.option("--out", type=_FOLDER, default="halfstep-demo", help="folder for report.html and results.json")
@click.option("--epochs", type=click.IntRange(1), default=7, help="passes over 1,437 images")
@click.option("--width", type=click.IntRange(8), default=64, help="channels of the first layer")
@click.option("--seed", type=int, default=0, help="seed of initial weights and data order")
def command(
    device: str | None, dtype: str | None, levels: list[str], out: Path, epochs: int, width: int, seed: int
) -> None:
    """Train a convolutional classifier on scikit-learn's digits at every opt level, side by side.

    Prints one table and writes report.html with pictures of time, memory, losses and loss scales.
    """
    if find_spec("sklearn") is None:
        raise click.ClickException(f"The demo also needs scikit-learn: {install_line('demo')}")

    import torch
    from rich.console import Console

    from halfstep.core.dtypes import default_half, parse_dtype
    from halfstep.core.hardware import slow_reason

    from .report import busy_note, write_report, write_results
    from .training import DemoSettings

    check_writable(out / "report.html")
    if device == "cuda" and not torch.cuda.is_available():
        raise click.ClickException("torch finds no CUDA device here; leave out --device cuda to train on the CPU.")
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    half = parse_dtype(dtype) if dtype else default_half(where)
    other = torch.bfloat16 if half is torch.float16 else torch.float16
    note = slow_reason(where, half)
    notes = [note] if note else []
    settings = DemoSettings(
        levels, where, half, epochs, seed, width, beside=other if dtype is None and "O2" in levels else None
    )

    console = Console()
    for sentence in notes:
        console.print(sentence, style="yellow")
    runs = _train(console, settings)
    _print_table(console, runs, where)
    busy = busy_note(runs)
    if busy:
        notes.append(busy)
        console.print(busy, style="yellow", highlight=False)
    write_report(out / "report.html", runs, settings, notes)
    write_results(out / "results.json", runs, settings)
    console.print(f"Pictures of time, memory, losses and loss scales: {out / 'report.html'}", soft_wrap=True)


def _train(console: Console, settings: DemoSettings) -> list[DemoRun]:
    """Train with a progress bar, or with one line per epoch if the output is not a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from .training import EPOCH_STEPS, train

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        steps = len(settings.runs()) * settings.epochs * EPOCH_STEPS
        task = progress.add_task("training", total=steps)
        return train(
            settings,
            lambda name: progress.update(task, advance=1, description=f"training at {name}"),
            lambda epoch, runs: None if console.is_terminal else _print_epoch(console, settings, epoch, runs),
        )


def _print_epoch(console: Console, settings: DemoSettings, epoch: int, runs: Sequence[DemoRun]) -> None:
    losses = ", ".join(f"{run.name} {run.final_loss:.3f}" for run in runs)
    seconds = sum(sum(run.step_seconds) for run in runs)
    console.print(
        f"epoch {epoch} of {settings.epochs}, {seconds:.0f} s: loss {losses}", highlight=False, soft_wrap=True
    )


def _print_table(console: Console, runs: list[DemoRun], device: torch.device) -> None:
    from rich import box
    from rich.table import Table

    from ..tables import print_whole
    from .report import summarize

    header, rows = summarize(runs, device)
    table = Table(box=box.SIMPLE, pad_edge=False, show_edge=False, padding=0)
    for name in header:
        words = name in ("level", "dtype", "computed")
        # A header of two words takes two lines, so that the table fits 80 columns.
        table.add_column("\n".join(name.split(" ", 1)), justify="left" if words else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    print_whole(console, table)
    console.print()
