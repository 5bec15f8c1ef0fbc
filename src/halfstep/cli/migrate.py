"""``halfstep migrate``: rewrites code that calls Apex so that it calls halfstep."""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..core.text import counted
from .source_files import find_sources, read_source, why_not_read, write_sources

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Migration", "command", "migrate"]


@dataclass(frozen=True)
class Migration:
    """A source text and its rewriting.

    Attributes:
        before: the original text.
        after: the new text; equal to ``before`` if there was nothing to rewrite, or nothing could be rewritten.
        problems: pairs of a line number in ``before`` and a description of code that could not be rewritten.
        mentions: pairs of a line number in ``before`` and a comment or string that mentions Apex.
    """

    before: str
    after: str
    problems: list[tuple[int, str]]
    mentions: list[tuple[int, str]] = field(default_factory=list)


def migrate(source: str) -> Migration:
    """Rewrite the names of Apex in a Python source text.

    Raises:
        SyntaxError: if the text, or its rewritten form, is not valid Python.
    """
    if not any(word in source for word in _WORDS):
        return Migration(source, source, [])
    from ..compat.migrate.mentions import asked_by_string, mentions
    from ..compat.migrate.to_halfstep import to_halfstep

    mark, text = (source[:1], source[1:]) if source.startswith("\ufeff") else ("", source)  # the byte order mark
    after, problems = to_halfstep(text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # the original text has the same warnings
        compile(after, "<migrated>", "exec", dont_inherit=True)
    left = sorted({*problems, *asked_by_string(text)})
    lines = {line for line, _ in left}
    return Migration(source, mark + after, left, [found for found in mentions(text) if found[0] not in lines])


_WORDS = ("apex", "amp_C", "syncbn")
_NOTEBOOK = Migration("", "", [], [(1, "a notebook, which is not rewritten")])


def _migrate_file(path: Path) -> Migration | str:
    """Rewrite a file; returns a message if it cannot be read."""
    if path.suffix == ".ipynb":
        return _NOTEBOOK
    try:
        return migrate(read_source(path))
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        return why_not_read(error)


@click.command(epilog="Example: halfstep migrate src/ --write")
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--write", is_flag=True, help="change the files; otherwise only show what would change")
def command(paths: tuple[Path, ...], write: bool) -> None:
    """Rewrite the calls of Apex in PATHS, files or folders, and show the difference.

    Exits with 1 if something is left that could not be rewritten. Comments and strings that speak of Apex are listed.
    """
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    left = changed = mentioned = 0
    for path in paths:
        if not path.is_dir() and path.suffix not in (".py", ".pyw", ""):
            first = "make it one with `jupyter nbconvert --to script`, or " if path.suffix == ".ipynb" else ""
            raise click.BadParameter(
                f"{path} is no Python file; {first}name files that end in .py, or folders with such files."
            )
    files = [path for path in find_sources(paths) if _speaks_of_apex(path)]
    rewritten: Iterable[tuple[Path, Migration | str]] = ((path, _migrate_file(path)) for path in files)
    if write:  # before printing, because the reader of the output may close the pipe
        rewritten = list(rewritten)
        new = [(path, each) for path, each in rewritten if isinstance(each, Migration) and each.after != each.before]
        write_sources({path: each.after for path, each in new})
    for path, found in rewritten:
        if isinstance(found, str):
            console.print(f"{path}: {found}", style="red", markup=False)
            left += 1
            continue
        if found.after != found.before:
            changed += 1
            _show(console, path, found)
        for line, text in found.problems:
            console.print(f"{path}:{line}: {text}", style="yellow", markup=False)
        for line, text in found.mentions:
            console.print(f"{path}:{line}: mentions Apex: {text}", style="dim", markup=False)
        left += len(found.problems)
        mentioned += len(found.mentions)
    done = "changed" if write else "would change"
    said = [f"{counted(changed, 'file')} {done}", f"{counted(left, 'place')} left"]
    said += [counted(mentioned, "mention")] if mentioned else []
    console.print(", ".join(said), style="bold", markup=False)
    sys.exit(1 if left else 0)


def _speaks_of_apex(path: Path) -> bool:
    """True if a file mentions Apex, or cannot be read and might."""
    try:
        text = path.read_bytes()
    except OSError:
        return True
    return any(word.encode() in text for word in _WORDS)


def _show(console: Console, path: Path, found: Migration) -> None:
    styles = {"+": "green", "-": "red", "@": "cyan"}
    before, after = found.before.splitlines(), found.after.splitlines()
    for line in difflib.unified_diff(before, after, str(path), str(path), lineterm="", n=2):
        console.print(line, style=styles.get(line[0]), markup=False)
