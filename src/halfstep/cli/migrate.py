"""``halfstep migrate``: rewrites code that calls Apex to call halfstep, or plain torch where that does the same."""

from __future__ import annotations

import difflib
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Migration", "command", "migrate"]


@dataclass(frozen=True)
class Migration:
    """A source text and its rewriting.

    Attributes:
        before: the text.
        after: the new text; the same if nothing had to be done, or nothing could be.
        problems: line numbers of the text before, and what could not be rewritten there.
    """

    before: str
    after: str
    problems: list[tuple[int, str]]


def migrate(source: str, to: str = "halfstep") -> Migration:
    """Rewrite what a Python source text asks of Apex.

    Args:
        source: the text.
        to: "halfstep" or "torch".

    Raises:
        SyntaxError: if the text is no Python, or its rewriting would not be.
    """
    import libcst as cst
    from libcst.metadata import MetadataWrapper

    from ..compat.migrate.to_halfstep import ToHalfstep
    from ..compat.migrate.to_torch import to_torch

    if not any(name in source for name in ("apex", "amp_C", "syncbn")):
        return Migration(source, source, [])
    try:
        tree = MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=False)
    except cst.ParserSyntaxError as error:
        raise SyntaxError(f"line {error.raw_line}: {error.message}") from None
    if to == "torch":
        after, problems = to_torch(tree)
    else:
        rewriting = ToHalfstep()
        after, problems = tree.visit(rewriting).code, rewriting.problems
    compile(after, "<migrated>", "exec", dont_inherit=True)
    return Migration(source, after, sorted(set(problems)))


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--to", type=click.Choice(["halfstep", "torch"]), default="halfstep", show_default=True)
@click.option("--write", is_flag=True, help="change the files; otherwise only show what would change")
def command(paths: tuple[Path, ...], to: str, write: bool) -> None:
    """Rewrite the calls of Apex in PATHS, files or folders, and show the difference.

    Exits with 1 if something is left that could not be rewritten.
    """
    try:
        import libcst  # noqa: F401
    except ImportError:
        raise click.ClickException("halfstep migrate needs libcst: pip install 'halfstep[migrate]'") from None
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    left = changed = 0
    for path in _files(paths):
        try:
            found = migrate(path.read_bytes().decode("utf-8"), to)
        except (SyntaxError, UnicodeDecodeError) as error:
            console.print(f"{path}: not Python that can be read: {error}", style="red", markup=False)
            left += 1
            continue
        if found.after != found.before:
            changed += 1
            _show(console, path, found)
            if write:
                _replace(path, found.after)
        for line, text in found.problems:
            console.print(f"{path}:{line}: {text}", style="yellow", markup=False)
        left += len(found.problems)
    done = "changed" if write else "would change"
    console.print(f"{changed} files {done}, {left} places left", style="bold", markup=False)
    sys.exit(1 if left else 0)


def _files(paths: tuple[Path, ...]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        inside = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        found += [file for file in inside if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    return found


def _show(console: Console, path: Path, found: Migration) -> None:
    styles = {"+": "green", "-": "red", "@": "cyan"}
    before, after = found.before.splitlines(), found.after.splitlines()
    for line in difflib.unified_diff(before, after, str(path), str(path), lineterm="", n=2):
        console.print(line, style=styles.get(line[0]), markup=False)


def _replace(path: Path, text: str) -> None:
    """Write a file so that an interruption leaves the old one; its permissions stay."""
    with tempfile.NamedTemporaryFile("wb", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            file.write(text.encode("utf-8"))
            os.chmod(file.name, path.stat().st_mode)
            os.replace(file.name, path)
        except OSError:
            os.unlink(file.name)
            raise
