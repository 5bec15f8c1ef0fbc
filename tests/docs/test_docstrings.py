"""Docstrings of halfstep begin with a verb or a noun, docstrings of booleans with "True if"; none says "somebody"."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parents[2] / "src/halfstep"
ROOMS = sorted(path.name for path in SOURCES.iterdir() if path.is_dir() or path.suffix == ".py")

FIRST = r"(?i:called|how|its?|of|such|th(at|ese|ey|is|ose)|wh(at|atever|ere|ether|ich|o|ose|y))\b"
REFUSED = {
    "first word": rf"\A\W*((?:As|When)\b|{FIRST})",
    "first word of an argument": rf"^ +\**[a-z]\w*: {FIRST}",
    "phrase": r"(?i)\b((that|those)\s+(of|who|whose|that|which)|the\s+others|one\s+another)\b",
    "pronoun": r"(?i)\b((some|no)body|wh(at|o|ich)(so)?ever)\b",
}
"""A docstring begins with a verb or a noun, repeats the noun, and names who acts (user code, DDP, autograd)."""


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Yield the line and text of each docstring, with the annotation of the function or attribute that it describes."""
    for owner in ast.walk(tree):
        body = getattr(owner, "body", None)
        for before, node in itertools.pairwise([owner, *body] if isinstance(body, list) else ()):
            match node:
                case ast.Expr(ast.Constant(str(text))):
                    annotation = getattr(before, "returns", None) or getattr(before, "annotation", None)
                    yield node.lineno, text, "" if annotation is None else ast.unparse(annotation)


def violations(source: str) -> list[str]:
    """Return the violations of a source as ``line: kind: text``; the text is the refused one."""
    found = []
    for line, text, annotation in docstrings(ast.parse(source)):
        if annotation == "bool" and re.match(r"(The|An?|Each|All|Any|No|Some) ", text):
            found.append(f"{line}: not 'True if': {text[:60]}")
        for kind, pattern in REFUSED.items():
            found += [f"{line}: {kind}: {each[0]}" for each in re.finditer(pattern, text, re.M)]
    return found


@pytest.mark.parametrize(
    ("source", "kinds"),
    [
        ('def f():\n "Whether it runs."', ["first word"]),
        ('x = 1\n"""The scale, or that\nof somebody."""', ["phrase", "pronoun"]),
        ('def f() -> bool:\n "The answer."', ["not 'True if'"]),
        ('def f():\n """Draw.\n\n Args:\n  x: how wide."""', ["first word of an argument"]),
        ('def f() -> bool:\n """True if drawn.\n\n Raises:\n  UsageError: where x is None."""', []),
    ],
)
def test_the_lint_finds_words_that_describe_nothing(source: str, kinds: list[str]) -> None:
    assert [each.split(": ")[1] for each in violations(source)] == kinds


@pytest.mark.parametrize("room", ROOMS)
def test_the_docstrings_of_a_room_name_what_they_describe(room: str) -> None:
    files = [path for path in sorted(SOURCES.rglob("*.py")) if path.relative_to(SOURCES).parts[0] == room]
    found = [f"{path.relative_to(SOURCES)}:{each}" for path in files for each in violations(path.read_text())]
    assert found == []
