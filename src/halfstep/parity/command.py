"""``halfstep parity``: finds the first op at which two callables round differently."""

from __future__ import annotations

import runpy
import shlex
from pathlib import Path
from typing import Any

import click

__all__ = ["command"]


def _load(text: str) -> Any:
    """Return what a side names: ``file.py:name``, run with the seed 0, or the path of a saved run."""
    import torch

    path, _, name = text.rpartition(":")
    if not path:
        return text
    torch.manual_seed(0)
    found = runpy.run_path(path) if Path(path).is_file() else {}
    if name not in found:
        raise click.BadParameter(f"{text!r}: there is no file {path} with a name {name!r} at its top level.")
    return found[name]


@click.command()
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
        given = _load(f"{a.rpartition(':')[0]}:{inputs}") if ":" in a else None
        found = parity(_load(a), _load(b), given)
    except HalfstepError as error:
        raise click.ClickException(str(error)) from None
    click.echo(str(found))
    if html is not None:
        found.report(html, command=shlex.join(["halfstep", "parity", a, b, f"--html={html}"]))
        click.echo(f"halfstep: wrote {html}", err=True)
    raise SystemExit(0 if found else 1)
