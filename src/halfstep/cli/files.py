"""Checks of the files that a command will write."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import click

__all__ = ["check_writable"]


def check_writable(*paths: Path | None) -> None:
    """Refuse paths that cannot be written, before the command does any work. None stands for no file.

    Raises:
        click.ClickException: if a path exists and is read-only, or no file can be created in its folder, or in the
            nearest existing folder above.
    """
    for path in filter(None, paths):
        if path.exists() and not os.access(path, os.W_OK):
            raise click.ClickException(f"{path} cannot be written: it is read-only.")
        folder = path.resolve().parent
        while not folder.exists():
            folder = folder.parent
        try:
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise click.ClickException(f"{path} cannot be written: {error.strerror}: {folder}") from None
