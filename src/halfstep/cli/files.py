"""Files that a command is asked to write."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import click

__all__ = ["check_writable"]


def check_writable(path: Path) -> None:
    """Refuse a path where no file can be written, before any work is done for it.

    Raises:
        click.ClickException: if it is there and read-only, or no file can be made in its folder, or in the first one
            above it that is there.
    """
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
