"""Imports inside of halfstep follow the map in ARCHITECTURE.md: they point down only, and never in a circle.

Every import counts, also one inside of a function, under ``TYPE_CHECKING``, or by ``import_module``.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.python import python

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "halfstep"


def name_of(path: Path) -> str:
    """``halfstep.kernels.expr`` for a file, ``halfstep.kernels`` for the ``__init__.py`` of a folder."""
    parts = path.relative_to(SOURCES.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(path): path for path in SOURCES.rglob("*.py")}


def imported_by(module: str, text: str, *, is_package: bool) -> Iterator[str]:
    """The modules of halfstep that the text of a module imports."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in FILES)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                found = next((name for name in (f"{base}.{alias.name}", base) if name in FILES), None)
                if found is not None and found != module:
                    yield found
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            yield from named_by(node, module, package)


def named_by(call: ast.Call, module: str, package: list[str]) -> Iterator[str]:
    """The module of halfstep that a call of ``import_module`` names, or the package that what it looks up is in.

    Only rooms that users call may compute the whole of a name: they are handed names of other people's modules, as
    ``diagnostics.named`` is by command lines.
    """
    parts = call.args[0].values if isinstance(call.args[0], ast.JoinedStr) else [call.args[0]]
    known = parts[0].value if isinstance(parts[0], ast.Constant) else ""
    assert isinstance(known, str)
    if not known:
        computes = ("halfstep", "cli", "compat", "diagnostics")
        assert room_of(module) in computes, f"{module}: {ast.unparse(call)} may import anything"
    elif (name := known.lstrip(".")) != known or known.startswith("halfstep."):
        above = package[: len(package) + 1 - (len(known) - len(name))] if name != known else []
        path = ".".join([*above, *name.split(".")]).rstrip(".")
        found = path if path in FILES else path.rpartition(".")[0]
        if found != module:
            yield found


def rooms() -> dict[str, int]:
    """The rooms on the map, and the height of each: rooms on one line have one height."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    picture = re.search(r"```rooms\n(.*?)```", text, re.DOTALL)
    assert picture is not None, "ARCHITECTURE.md has no picture of the rooms"
    lines = [re.split(r"\s{2,}", line)[0] for line in reversed(picture[1].splitlines()) if line[:1].strip()]
    return {room: height for height, line in enumerate(lines) for room in line.split(", ")}


HEIGHT = rooms()


def room_of(module: str) -> str:
    """The folder below ``halfstep`` that a module is in; ``halfstep`` for the public names, files right below it."""
    folder = module.split(".")[1] if "." in module else module
    return folder if (SOURCES / folder).is_dir() else "halfstep"


@functools.cache
def imports() -> dict[str, list[str]]:
    """The modules of halfstep that each module imports."""
    return {
        module: sorted(set(imported_by(module, path.read_text(), is_package=path.name == "__init__.py")))
        for module, path in FILES.items()
    }


def wrong(module: str, target: str) -> bool:
    """Whether an import goes up, or across to a room of the same height."""
    here, there = room_of(module), room_of(target)
    return here != there and HEIGHT[there] >= HEIGHT[here]


def test_the_map_shows_every_room_and_no_other() -> None:
    there = {room_of(module) for module in FILES} - {"_version", "__main__"}
    assert set(HEIGHT) == there


def test_imports_point_down() -> None:
    arrows = [(module, t) for module, targets in imports().items() for t in targets]
    free = {"halfstep.__main__", "halfstep._version"}
    assert [arrow for arrow in arrows if free.isdisjoint(arrow) and wrong(*arrow)] == []


def test_every_path_on_the_map_exists() -> None:
    paths = re.findall(r"`([\w./-]+(?:/|\.\w{2,3}))`", (ROOT / "ARCHITECTURE.md").read_text())
    assert [path for path in paths if not any((top / path).exists() for top in (ROOT, SOURCES, ROOT / "tests"))] == []


def test_class_names_are_unique() -> None:
    """Apex has two classes ``LossScaler``; ``oplists.Entry`` and ``numerics.Entry`` are public names."""
    trees = (ast.parse(path.read_text()) for path in FILES.values())
    names = Counter(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert {name for name, count in names.items() if count > 1} == {"Entry", "LossScaler"}


def test_no_module_imports_itself_in_a_circle() -> None:
    # A package imports what is in it, and what is in it may be imported by way of the package.
    graph = {module: [t for t in targets if not t.startswith(f"{module}.")] for module, targets in imports().items()}
    graphlib.TopologicalSorter(graph).prepare()  # its CycleError names the modules


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from ..core.errors import UsageError", "halfstep.core.errors"),
        ("from .. import core", "halfstep.core"),
        ("import halfstep.core.errors", "halfstep.core.errors"),
        ("def f():\n    from ..amp import session", "halfstep.amp.session"),
        ("if TYPE_CHECKING:\n    from ..amp.session import session_of", "halfstep.amp.session"),
        ("def f():\n    import_module('halfstep.amp.session')", "halfstep.amp.session"),
        ("def __getattr__(name):\n    return importlib.import_module(f'..compat.{name}', __name__)", "halfstep.compat"),
    ],
)
def test_an_import_is_found_wherever_it_stands(text: str, found: str) -> None:
    assert list(imported_by("halfstep.kernels.expr", text, is_package=False)) == [found]


def test_a_room_may_not_compute_the_whole_name_of_a_module() -> None:
    with pytest.raises(AssertionError, match="may import anything"):
        list(imported_by("halfstep.kernels.expr", "import_module(name)", is_package=False))


def test_names_that_a_higher_room_makes_cost_no_import() -> None:
    code = "import sys, halfstep.amp; print([name for name in sys.modules if name.startswith('halfstep.compat')])"
    assert python("-c", code).stdout == "[]\n"


def test_an_import_upward_and_one_across_are_wrong() -> None:
    assert wrong("halfstep.kernels.expr", "halfstep.amp.session")
    assert wrong("halfstep.compat.install", "halfstep.paddle.model.model")
    assert not wrong("halfstep.amp.session", "halfstep.kernels.expr")
    assert not wrong("halfstep.kernels.expr", "halfstep.kernels.storage")
