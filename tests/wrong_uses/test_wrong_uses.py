"""Every wrong use is refused at once, in words that say what was given, what is allowed and what to do.

Nothing has changed afterwards: neither weights, gradients, hooks, groups and state nor scales and the casts of the
process. The tables are the text files beside this one. A line in brackets names the world of the lines below it, by a
function of ``worlds.py``. Each of those is an expression, the error that it must raise, and words of the message. What
begins with spaces goes on with the line above. In ``switches.txt`` and ``dtypes.txt``, ``VALUE`` stands for each of
some wrong values.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from click.testing import CliRunner

from halfstep import static
from halfstep.cli.app import app
from halfstep.core import errors
from halfstep.core.errors import ArgumentIndexError, ArgumentTypeError, ArgumentValueError, HalfstepError

from .uses import NAMES
from .worlds import same, snapshot

TABLES = ("initialize", "amp", "scalers", "optimizers", "static", "faces")
BUILTIN = {"IndexError": ArgumentIndexError, "TypeError": ArgumentTypeError, "ValueError": ArgumentValueError}


class Wrong(NamedTuple):
    """One wrong use.

    Attributes:
        world: an expression that makes a function, which makes the objects.
        use: an expression with the objects by name, and with the world as ``w``.
        error: what must be raised.
        words: what the message must have in it.
        value: what ``VALUE`` is in the expression.
    """

    world: str
    use: str
    error: type[HalfstepError]
    words: list[str]
    value: Any = None


def lines(table: str) -> Iterator[tuple[str, str, list[str]]]:
    """The world, the expression, and the rest of every line of a table."""
    text, world = Path(__file__).with_name(f"{table}.txt").read_text(encoding="utf-8"), ""
    for line in text.replace("\n    ", " ").splitlines():
        if line.startswith("["):
            world = line[1:-1]
        elif line and not line.startswith("#"):
            use, _, rest = line.partition(" => ")
            yield world, use, rest.split(" | ")


def read(table: str) -> Iterator[Wrong]:
    for world, use, (first, *words) in lines(table):
        name, _, word = first.partition(": ")
        yield Wrong(world, use, BUILTIN.get(name) or getattr(errors, name), [word, *words])


NO_SWITCHES = ["no", 0.0]  # more of them are in core/test_switches.py
NO_DTYPES = {True: ArgumentTypeError, 16: ArgumentTypeError, torch.int8: ArgumentValueError}

ROWS = [row for table in TABLES for row in read(table)]
SWITCHES = [
    Wrong(world, use, ArgumentTypeError, [repr(value), "True"], value)
    for world, use, _ in lines("switches")
    for value in NO_SWITCHES
]
DTYPES = [
    Wrong(world, use, error, [repr(value)], value)
    for world, use, _ in lines("dtypes")
    for value, error in NO_DTYPES.items()
]


def named(row: Wrong) -> str:
    return row.use.replace("VALUE", repr(row.value)).replace("::", ":")


@pytest.mark.parametrize("row", [*ROWS, *SWITCHES, *DTYPES], ids=named)
def test_a_wrong_use_is_refused_in_words_that_help(row: Wrong, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    world = eval(row.world, NAMES)()
    before = snapshot(world)
    with pytest.raises(row.error) as raised:
        eval(row.use, {**NAMES, **vars(world), "w": world, "VALUE": row.value})
    message = str(raised.value)
    assert isinstance(raised.value, HalfstepError)
    assert [words for words in row.words if words not in message] == [], message
    after = snapshot(world)
    assert [name for name in before if not same(before[name], after[name])] == []
    if hasattr(world, "handle"):
        world.handle._deactivate()  # it has a hook on every module
    if hasattr(world, "guard"):
        world.guard.__exit__(None, None, None)
        static.disable_static()


def test_the_tables_are_long_and_have_no_row_twice() -> None:
    assert len(ROWS) >= 390
    assert len(SWITCHES) >= 70
    assert len(DTYPES) >= 33
    assert [each for each, count in Counter((row.world, row.use) for row in ROWS).items() if count > 1] == []


@pytest.mark.parametrize("command", [*lines("commands")], ids=lambda command: command[1])
def test_a_wrong_command_is_refused_before_it_does_anything(
    command: tuple[str, str, list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, arguments, words = command
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text("raise SystemExit('it ran')")
    done = CliRunner().invoke(app, shlex.split(arguments))
    said = " ".join(done.output.split())
    assert done.exit_code in (1, 2)
    assert "it ran" not in said
    assert [each for each in words if each not in said] == [], said
    assert [path.name for path in tmp_path.iterdir()] == ["x.py"]
