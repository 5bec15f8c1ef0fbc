"""``halfstep parity``: finds the first op at which two callables round differently."""

from __future__ import annotations

import shlex
from typing import Any

import click

__all__ = ["command"]


def _side(text: str) -> Any:
    """Return what a side names, or the path of a saved run."""
    from ..diagnostics.named import named

    return named(text) if text.rpartition(":")[0] else text


@click.command(epilog="Example: halfstep parity reference.py:model mine.py:model")
@click.argument("a", metavar="A.PY:NAME")
@click.argument("b", metavar="B.PY:NAME")
@click.option("--inputs", metavar="NAME", default="inputs", help="the name of the inputs in A.PY; default: inputs")
@click.option("--html", metavar="FILE", help="also write a page")
def command(a: str, b: str, inputs: str, html: str | None) -> None:
    """Print the first op at which two callables round differently, and which of them rounds more.

    A side is a model or function at the top level of a file, which runs with the seed 0, or a run that parity.record
    saved. Exits with 1 if the sides differ.
    """
    from ..core.errors import HalfstepError
    from .two_sides import parity

    try:
        given = _side(f"{a.rpartition(':')[0]}:{inputs}") if ":" in a else None
        found = parity(_side(a), _side(b), given)
    except HalfstepError as error:
        raise click.ClickException(str(error)) from None
    click.echo(str(found))
    if html is not None:
        found.report(html, command=shlex.join(["halfstep", "parity", a, b, f"--html={html}"]))
        click.echo(f"halfstep: wrote {html}", err=True)
    raise SystemExit(0 if found else 1)
