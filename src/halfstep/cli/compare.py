"""``halfstep compare``: finds the place at which two saved runs diverge."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from .files import check_writable

__all__ = ["command"]

_SAVED = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(epilog="Example: halfstep compare fp32.jsonl fp16.jsonl --html compare.html")
@click.argument("reference", metavar="A", type=_SAVED)
@click.argument("candidate", metavar="B", type=_SAVED)
@click.option("--html", metavar="F", type=click.Path(dir_okay=False, path_type=Path), help="write a page of pictures")
def command(reference: Path, candidate: Path, html: Path | None) -> None:
    """Print which module of run B adds error to what run A has.

    Both files are what `halfstep run --numerics` or halfstep.numerics.Monitor saved.
    """
    from ..core.errors import HalfstepError
    from ..diagnostics.numerics import compare

    check_writable(html)
    try:
        comparison = compare(reference, candidate)
    except HalfstepError as error:
        raise click.ClickException(str(error)) from None
    click.echo(str(comparison))
    if html is not None:
        line = ["halfstep", "compare", str(reference), str(candidate), f"--html={html}"]
        comparison.report(html, command=shlex.join(line))
        click.echo(f"halfstep: wrote {html}", err=True)
