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


def make_command(script_of: Any, options: Callable[[Any], Any], context_settings: dict[str, Any]) -> click.Command:
    """Make the command.

    Args:
        script_of: the class of scripts.
        options: the options and arguments that describe a script.
        context_settings: the settings of a command that takes a script.
    """

    @click.command(context_settings=context_settings)
    @click.option("--level", "--opt-level", type=click.Choice(["O0", "O1", "O2"]), help=_LEVELS)
    @click.option("--html", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path), help="write an HTML page")
    @options
    @click.pass_obj
    def command(later: list[Callable[[], None]], /, level: str | None, html: Path | None, **given: Any) -> None:
        """Run SCRIPT with ARGS until its eighth optimizer step, and print where its time goes and what would help."""
        found = script_of(*(given[name] for name in ("script", "args", "module", "device", "trust_checkpoints")))
        found.check(click.get_current_context())
        later.append(functools.partial(_profile, found, level, html))

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
