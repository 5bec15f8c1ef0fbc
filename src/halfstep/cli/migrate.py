"""``halfstep migrate``: rewrites code that calls Apex to call halfstep, or plain torch where that does the same."""

from __future__ import annotations

import ast
import difflib
import multiprocessing
import os
import sys
import warnings
from collections.abc import Hashable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

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
        before: the text.
        after: the new text; the same if nothing had to be done, or nothing could be.
        problems: line numbers of the text before, and what could not be rewritten there.
        mentions: line numbers of the text before, and comments and strings there that speak of Apex.
    """

    before: str
    after: str
    problems: list[tuple[int, str]]
    mentions: list[tuple[int, str]] = field(default_factory=list)


def migrate(source: str, to: str = "halfstep") -> Migration:
    """Rewrite what a Python source text asks of Apex.

    Args:
        source: the text.
        to: "halfstep" or "torch".

    Raises:
        SyntaxError: if the text is no Python, or its rewriting would not be.
    """
    if not any(word in source for word in _WORDS):
        return Migration(source, source, [])
    if to == "torch":
        return migrate_to_torch({"": source})[""]
    from ..compat.migrate.to_halfstep import to_halfstep

    mark, text = _mark(source)
    return _migration(source, mark, *to_halfstep(text))


def migrate_to_torch(
    sources: Mapping[_Key, str], *, accumulation: bool = False, o2_as_o1: bool = False
) -> dict[_Key, Migration]:
    """Rewrite files that belong together for plain torch: all of them, or none. Those with nothing to do are left out.

    Args:
        sources: the text of each file.
        accumulation: have a GradScaler move its scale once for all backward passes of a step.
        o2_as_o1: rewrite O2 as O1, whose weights are fp32.

    Raises:
        SyntaxError: if a text is no Python, or its rewriting would not be.
    """
    from ..compat.migrate.to_torch import to_torch

    parts = {key: _mark(source) for key, source in sources.items()}
    found = to_torch({key: text for key, (_, text) in parts.items()}, accumulation=accumulation, o2_as_o1=o2_as_o1)
    done = [key for key in found if found[key] != (parts[key][1], []) or any(word in sources[key] for word in _WORDS)]
    return {key: _migration(sources[key], parts[key][0], *found[key], to="torch") for key in sources if key in done}


def _mark(source: str) -> tuple[str, str]:
    """The byte order mark of a text, if there is one, and the rest."""
    return (source[:1], source[1:]) if source.startswith("\ufeff") else ("", source)


def _migration(source: str, mark: str, after: str, problems: list[tuple[int, str]], to: str = "halfstep") -> Migration:
    from ..compat.migrate.mentions import asked_by_string, mentions

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of the text before, too
        compile(after, "<migrated>", "exec", dont_inherit=True)
    text = source[len(mark) :]
    left = sorted({*problems, *asked_by_string(text, optional=to == "halfstep")})
    lines = {line for line, _ in left}
    return Migration(source, mark + after, left, [found for found in mentions(text) if found[0] not in lines])


_Key = TypeVar("_Key", bound=Hashable)
_WORDS = ("apex", "amp_C", "syncbn")
_NOTEBOOK = Migration("", "", [], [(1, "a notebook, which is not rewritten")])
_PARALLEL = 64
"""From this many files on, other processes help with --to halfstep; each takes seconds to start."""


def _migrate_files(files: list[Path]) -> Iterator[Migration | str]:
    """The rewritings to halfstep, in order."""
    workers = min(os.cpu_count() or 1, len(files) // (_PARALLEL // 2))
    if workers < 2:
        yield from map(_migrate_file, files)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(_migrate_file, files, chunksize=4)


def _migrate_file(path: Path) -> Migration | str:
    """The rewriting of a file, or why it cannot be read."""
    if path.suffix == ".ipynb":
        return _NOTEBOOK
    try:
        return migrate(read_source(path))
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        return why_not_read(error)


def _migrate_packages(paths: tuple[Path, ...], **options: bool) -> Iterator[tuple[Path, Migration | str]]:
    """The rewritings to torch: of each folder whole, or not at all."""
    for path in paths:
        sources, broken = {}, {}
        for file in find_sources((path,)):
            if file.suffix == ".ipynb":
                if _speaks_of_apex(file):
                    yield file, _NOTEBOOK
                continue
            try:
                text = read_source(file)
                ast.parse(text.removeprefix("\ufeff"))
                sources[file] = text
            except (OSError, SyntaxError, UnicodeDecodeError) as error:
                if _speaks_of_apex(file):
                    broken[file] = why_not_read(error)
        try:
            found = migrate_to_torch(sources, **options)
        except SyntaxError as error:  # of a rewriting: a fault of ours, and nothing is written
            yield path, f"nothing is changed, because the new text would be no Python; please report this: {error}"
            continue
        whole = not broken and not any(each.problems for each in found.values())
        yield from broken.items()
        for file, each in found.items():
            if each.problems or each.mentions or each.after != each.before:
                yield file, each if whole else replace(each, after=each.before)


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option(
    "--to",
    type=click.Choice(["halfstep", "torch"]),
    default="halfstep",
    show_default=True,
    help="whose names the code is to call; torch.amp does not have all that Apex has",
)
@click.option(
    "--accumulation",
    is_flag=True,
    help="with --to torch: have a GradScaler move its scale once for all backward passes of a step, and not after each",
)
@click.option(
    "--o2-as-o1",
    is_flag=True,
    help="with --to torch: train O2 as O1, with fp32 weights: more memory, and losses that differ by rounding",
)
@click.option("--write", is_flag=True, help="change the files; otherwise only show what would change")
def command(paths: tuple[Path, ...], to: str, accumulation: bool, o2_as_o1: bool, write: bool) -> None:
    """Rewrite the calls of Apex in PATHS, files or folders, and show the difference.

    With --to torch a folder is rewritten whole or not at all. Exits with 1 if something is left that could not be
    rewritten. Comments and strings that speak of Apex are listed.
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
    rewritten: Iterable[tuple[Path, Migration | str]]
    if to == "torch":
        rewritten = _migrate_packages(paths, accumulation=accumulation, o2_as_o1=o2_as_o1)
    else:
        files = [path for path in find_sources(paths) if _speaks_of_apex(path)]
        rewritten = zip(files, _migrate_files(files), strict=True)
    if write:  # first: what reads the output may close it
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
    """Whether Apex is in a file; one that cannot be read may have it."""
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
