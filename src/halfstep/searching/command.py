"""``halfstep search``: finds what must stay in fp32, for a function that makes a model, a step and batches."""

from __future__ import annotations

import shlex
from typing import Any

import click

__all__ = ["command"]


@click.command(epilog="Example: halfstep search train.py:setup --level O2 --report search.html")
@click.argument("source", metavar="MODULE:FUNCTION")
@click.option("--dtype", type=click.Choice(["float16", "bfloat16"]), default="float16", help="default: float16")
@click.option("--level", "--opt-level", type=click.Choice(["O1", "O2"]), default="O1", help="default: O1")
@click.option("--products", metavar="RECIPE", help="find which linear layers must not use this recipe")
@click.option("--passes", is_flag=True, help="with --products: find which of the three products of a layer")
@click.option("--budget", type=click.IntRange(1), help="the largest number of guarded runs")
@click.option("--report", metavar="FILE", help="also write a page")
@click.option("--save", metavar="FILE", help="also write the result as JSON")
def command(source: str, budget: int | None, report: str | None, save: str | None, **options: Any) -> None:
    """Print which modules must stay in fp32.

    FUNCTION takes no arguments and returns a model in fp32, a step of (model, batch) that returns the loss, and
    batches. Exits with 1 if there is no answer.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from ..core.errors import HalfstepError
    from ..diagnostics.named import named
    from .search import search

    console = Console(stderr=True)
    columns = (TextColumn("search: {task.description}"), BarColumn(20), TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task("", total=budget)

    def say(stage: str, runs: int, known: str) -> None:
        text = f"{stage}, {runs} guarded runs, {known}"
        bar.update(task, description=text, completed=runs)
        if bar.disable:
            click.echo(f"search: {text}", err=True)

    function = named(source)
    if not callable(function):
        raise click.BadParameter(f"{source!r} names no function; it must be MODULE:FUNCTION or FILE.PY:FUNCTION.")
    given = function()
    if not isinstance(given, tuple) or len(given) != 3:
        raise click.ClickException(f"{source} must return (model, step, batches), not {type(given).__name__}.")
    try:
        with bar:
            found = search(*given, budget=budget, progress=say, **options)
    except HalfstepError as error:
        raise click.ClickException(str(error)) from None
    click.echo(str(found))
    if save is not None:
        found.save(save)
        click.echo(f"halfstep: wrote {save}", err=True)
    if report is not None:
        set_to = {name: value for name, value in {**options, "budget": budget}.items() if value not in (None, False)}
        words = [f"--{name}" if value is True else f"--{name}={value}" for name, value in set_to.items()]
        found.report(report, shlex.join(["halfstep", "search", source, *words]))
        click.echo(f"halfstep: wrote {report}", err=True)
    raise SystemExit(0 if found.status == "found" else 1)
