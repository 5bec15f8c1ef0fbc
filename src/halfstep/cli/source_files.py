"""The files of ``halfstep migrate``: search, encoding, and writing of all or none."""

from __future__ import annotations

import os
import tempfile
import tokenize
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path

import click

from .files import check_writable

__all__ = ["find_sources", "read_source", "why_not_read", "write_sources"]


def find_sources(paths: Iterable[Path]) -> list[Path]:
    """Find the Python files and notebooks in folders, and files given directly; each file once.

    Hidden files are left out. An unreadable folder is listed as well, so that ``read_source`` reports it.
    """
    found = [file for path in paths for file in (_inside(path) if path.is_dir() else [path])]
    # Links come first, so that for a file and a link to it the dict keeps the file.
    kept = {file.resolve(): file for file in sorted(found, key=Path.is_symlink, reverse=True)}
    return [file for file in found if kept[file.resolve()] is file]


def _inside(folder: Path) -> list[Path]:
    found: list[Path] = []
    refused: list[OSError] = []
    for here, folders, names in os.walk(folder, onerror=refused.append):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files = [Path(here, name) for name in names if name.endswith((".py", ".ipynb")) and not name.startswith(".")]
        found += [file for file in files if file.is_file()]
    return sorted([*found, *(Path(error.filename) for error in refused)])


def read_source(path: Path) -> str:
    """Read a Python file in the encoding that its first lines declare. A byte order mark is kept.

    Raises:
        OSError, SyntaxError, UnicodeDecodeError: if the file cannot be read; see ``why_not_read``.
    """
    return path.read_bytes().decode(_encoding(path))


def _encoding(path: Path) -> str:
    with path.open("rb") as file:
        return tokenize.detect_encoding(file.readline)[0].replace("utf-8-sig", "utf-8")


def why_not_read(error: OSError | SyntaxError | UnicodeDecodeError) -> str:
    """Describe the error of a file that is not text, or not Python."""
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror}"
    if isinstance(error, SyntaxError):
        where = f" (line {error.lineno})" if error.lineno else ""
        return f"not Python that can be read: {error.msg}{where}"
    return f"not Python that can be read: {error}"


def write_sources(texts: Mapping[Path, str]) -> None:
    """Write all files, or none if one cannot be written. Permissions and links are kept.

    Raises:
        click.ClickException: with the file that cannot be written, and the reason.
    """
    check_writable(*texts)
    with ExitStack() as stack:  # an interruption also keeps the old files and leaves no new ones
        made = []
        for path, text in texts.items():
            target = path.resolve()
            try:
                number, name = tempfile.mkstemp(dir=target.parent, prefix=f".{path.name}.")
                stack.callback(Path(name).unlink, missing_ok=True)
                with open(number, "wb") as new:
                    new.write(text.encode(_encoding(path)))
                os.chmod(name, target.stat().st_mode)
            except OSError as error:
                raise click.ClickException(f"{path} cannot be written: {error.strerror}. No file is changed.") from None
            made.append((name, target))
        for name, target in made:
            os.replace(name, target)
