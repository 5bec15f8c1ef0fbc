"""``halfstep profile``: the command, made of what the command line knows of scripts."""

from __future__ import annotations

import functools
import shlex
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from ..core.text import counted

__all__ = ["make_command"]

_LEVELS = "cast its ops to bfloat16 (O1), its model after its first step (O2), or nothing (O0)"
_EXAMPLE = "Example: halfstep profile --html profile.html train.py"


def make_command(takes_script: Callable[[Any], Any], context_settings: dict[str, Any]) -> click.Command:
    """Make the command.

    Args:
        takes_script: gives the command its script as the first argument, and calls the function that it returns.
        context_settings: the settings of a command that takes a script.
    """

    @click.command(context_settings=context_settings, epilog=_EXAMPLE)
    @click.option("--level", "--opt-level", type=click.Choice(["O0", "O1", "O2"]), help=_LEVELS)
    @click.option("--html", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path), help="write an HTML page")
    @takes_script
    def command(script: Any, level: str | None, html: Path | None) -> Callable[[], None]:
        """Run SCRIPT with ARGS until its eighth optimizer step, and print where its time goes and what would help."""
        return functools.partial(_profile, script, level, html)

    return command


def _profile(script: Any, level: str | None, html: Path | None) -> None:
    from ..amp import auto_cast, initialize
    from .run import of_run

    to_o2 = functools.partial(initialize, opt_level="O2", dtype="bfloat16", verbosity=0) if level == "O2" else None
    with ExitStack() as stack:
        stack.enter_context(script.prepared("profile"))
        if level in ("O0", "O1"):
            stack.enter_context(auto_cast(level == "O1", level="O1", dtype="bfloat16"))
        found = of_run(script.run, to_o2)
    if isinstance(found, int):
        sys.exit(
            f"Error: {Path(script.name).name} has ended after {counted(found, 'optimizer step')} in this process. The "
            "first 3 are not measured: profile needs 4 or more. Give the script more batches."
        )
    if html is not None:
        found.report(html, shlex.join(script.line("profile", f"--html={html}")))
        click.echo(f"halfstep: wrote {html}", err=True)
    click.echo(str(found))
