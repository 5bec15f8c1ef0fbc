"""Every public name of halfstep is on a page of the reference, and so is what a public function returns."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import types
import typing
from abc import ABC
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import halfstep
from halfstep.core.checks import check_count

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs/api").glob("*.md"))
TEXT = "".join(page.read_text() for page in PAGES)
SHOWN = re.findall(r"^::: ([\w.]+)$", TEXT, re.M)
"""What mkdocstrings is asked to show: modules with all that is in them, classes, functions and values."""

MODULES = ["halfstep", *(f"halfstep.{name}" for name in halfstep._MODULES)]
MODULES += ["halfstep.amp.debugging", "halfstep.static.amp", "halfstep.static.backend"]


def find(path: str) -> Any:
    """The module, or the object in one, of a dotted path."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        parent, _, name = path.rpartition(".")
        return getattr(find(parent), name)


def needs_a_trainer(path: str) -> bool:
    """Whether it is an adapter, which can be imported only where its trainer is installed."""
    return path.startswith("halfstep.integrations.") and ".training_precision" not in path and ".figures" not in path


def shown_in(module: types.ModuleType) -> Iterator[Any]:
    """What mkdocstrings shows of a module: its own names and those of halfstep in its ``__all__``, with a docstring."""
    for name, value in vars(module).items():
        home = getattr(value, "__module__", None) or ""
        listed = name in getattr(module, "__all__", ()) and home.startswith("halfstep")
        if not name.startswith("_") and (listed or home == module.__name__) and inspect.getdoc(value):
            yield value


def documented() -> Iterator[Any]:
    for path in SHOWN:
        if not needs_a_trainer(path):
            found = find(path)
            yield found
            if isinstance(found, types.ModuleType):
                yield from shown_in(found)


DOCUMENTED = {id(each): each for each in documented()}


def is_documented(name: str, value: Any) -> bool:
    """Whether a page shows it, or has a page to itself as a module, or names what is another library's."""
    if isinstance(value, types.ModuleType):
        return (ROOT / f"docs/api/{name}.md").exists() or id(value) in DOCUMENTED
    is_ours = (getattr(value, "__module__", None) or "halfstep").startswith("halfstep")
    return id(value) in DOCUMENTED or (not is_ours and f"`{name}`" in TEXT)


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_on_a_page(module: str) -> None:
    found = importlib.import_module(module)
    names = [name for name in getattr(found, "__all__", ()) if not name.startswith("__")]
    assert [name for name in names if not is_documented(name, getattr(found, name))] == []


@pytest.mark.parametrize(
    "path", sorted((ROOT / "src/halfstep/integrations").glob("[!_]*.py")), ids=lambda path: path.stem
)
def test_every_adapter_is_on_a_page(path: Path) -> None:
    (names,) = [
        ast.literal_eval(node.value)
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign) and [getattr(target, "id", "") for target in node.targets] == ["__all__"]
    ]
    module = f"halfstep.integrations.{path.stem}"
    defined = {
        node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef | ast.FunctionDef)
    }
    assert [n for n in names if n in defined and module not in SHOWN and f"{module}.{n}" not in SHOWN] == []


def classes_in(hint: Any) -> Iterator[type]:
    """The classes of halfstep in an annotation."""
    if isinstance(hint, type) and hint.__module__.startswith("halfstep"):
        yield hint
    for part in typing.get_args(hint):
        yield from classes_in(part)


def test_what_a_public_function_returns_is_on_a_page() -> None:
    missing = set()
    for each in DOCUMENTED.values():
        if inspect.isfunction(each):
            returned = classes_in(typing.get_type_hints(each).get("return"))
            missing |= {f"{each.__qualname__} -> {c.__name__}" for c in returned if id(c) not in DOCUMENTED}
    assert missing == set()


def test_a_name_that_no_page_shows_is_found() -> None:
    assert not is_documented("check_count", check_count)
    assert not is_documented("ABC", ABC)
