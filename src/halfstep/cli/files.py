"""Files that a command is asked to write."""

from __future__ import annotations

import difflib
import tempfile
from pathlib import Path

import click

from ..core.text import listed

__all__ = ["check_script", "check_writable"]


def check_writable(path: Path) -> None:
    """Refuse a path where no file can be written, before any work is done for it.

    Raises:
        click.ClickException: if a file cannot be made in its folder, or in the first one above it that is there.
    """
    folder = path.resolve().parent
    while not folder.exists():
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise click.ClickException(f"{path} cannot be written: {error.strerror}: {folder}") from None


def check_script(ctx: click.Context, script: str) -> None:
    """Refuse what is no script: an option with a typing mistake, a folder, a file that is not there.

    Raises:
        click.UsageError: says what was given, and what may have been meant.
    """
    if script.startswith("-"):
        option = script.partition("=")[0]
        known = [name for param in ctx.command.params for name in (*param.opts, *param.secondary_opts)]
        known = [name for name in (*known, "--help") if name.startswith("-")]
        raise click.NoSuchOption(option, possibilities=difflib.get_close_matches(option, known, n=1), ctx=ctx)
    path = Path(script)
    if path.is_dir():
        inside = sorted(each.name for each in path.glob("*.py"))
        names = f": {listed(inside)}" if inside else ""
        raise click.BadParameter(f"{script!r} is a folder; name a script{names}.", ctx, param_hint="SCRIPT")
    if not path.is_file():
        raise click.BadParameter(f"File {script!r} does not exist.", ctx, param_hint="SCRIPT")
