"""Objects that a command line names: ``module:name``, or ``file.py:name``."""

from __future__ import annotations

import runpy
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import torch

__all__ = ["named"]


def named(text: str) -> Any:
    """Return the object of a name at the top level of a module or of a file, which runs with the seed 0.

    Raises:
        click.BadParameter: if there is no such file or module, or no such name in it.
    """
    path, _, name = text.rpartition(":")
    torch.manual_seed(0)
    sys.path.insert(0, "")
    try:
        found = runpy.run_path(path) if Path(path).is_file() else vars(import_module(path.strip(".") or "?"))
    except ModuleNotFoundError as error:
        raise click.BadParameter(f"{text!r}: there is no file or module {path!r} ({error}).") from None
    if name not in found:
        raise click.BadParameter(f"{text!r}: {path} has no name {name!r} at its top level.")
    return found[name]
