"""How much a reader must follow and read: the way of one batch, and the lines of code of each room, have budgets.

A change may lower a budget, never raise it. Docstrings, comments, blank lines and imports cost nothing
(``tools/code_lines.py``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.objects import attached_kinds
from benchmarks.walks import WALKS, Walk
from halfstep.kernels.launch import backend_for
from tests.support.python import python
from tools.code_lines import by_room

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "halfstep"

BUDGETS = {  # calls, files, returns
    "O2 bfloat16, SGD, scale_loss": (97, 25, 12),
    "O2 bfloat16, SGD, scale_loss, emulate=False": (70, 22, 12),
    "O2 float16, torch AdamW, scale_loss": (125, 32, 22),
    "GradScaler, SGD": (33, 12, 6),
    "FusedAdam.step": (17, 6, 2),
    "Model.fit at O1": (68, 9, 3),
    "Executor.run at O2": (98, 24, 14),
}

GROUPS = {  # rooms, of which each change may take lines from one to another
    "engine and amp": (
        *("torch_internals", "core", "kernels", "parameters", "casting", "optimizers", "stepping", "amp"),
    ),
    "compat": ("compat",),
    "diagnostics": ("diagnostics",),
    "paddle": ("paddle",),
}
CODE_LINES_OF_GROUPS = {"engine and amp": 11_612, "compat": 3_298, "diagnostics": 3_904, "paddle": 1_458}
ALL_CODE_LINES = 22_115
FEATURES = {"diagnosis": (484, 537), "formats": (1_499, 1_295), "searching": (844, 539)}
FEATURES |= {"profiling": (1_097, 782), "parity": (500, 443)}
"""Lines of code of a room and of its tests. The budgets of all sources and all tests leave them out (issue 48)."""
KINDS_AND_FIELDS = (9, 72)  # of the objects behind one attached optimizer
ALL_TEST_LINES = 35_893


def above(what: str, found: Sequence[int], budget: Sequence[int], units: Sequence[str], advice: str) -> str:
    """A sentence that says by how much something is above its budget; empty if it is not."""
    over = [
        f"{n} {unit}, {n - most} above its budget of {most}"
        for n, most, unit in zip(found, budget, units, strict=True)
        if n > most
    ]
    return f"{what} has {' and '.join(over)}. {advice}" if over else ""


def above_walk(name: str, found: Sequence[int], budget: Sequence[int]) -> str:
    advice = "See which in `python -m benchmarks walks`: make the way shorter."
    return above(f"The walk {name!r}", found, budget, ("calls", "files", "returns"), advice)


@pytest.fixture(scope="module")
def found() -> dict[str, list[int]]:
    """Calls, files and returns of each walk, in a process of its own: a model in a wrapper for ranks adds to all."""
    ran = python("-m", "benchmarks", "walks", "--brief", cwd=ROOT, quiet=True)
    ways = (line.rpartition(": ") for line in ran.stdout.splitlines())
    return {name: [int(n) for n in re.findall(r"\d+", way)[:3]] for name, _, way in ways}


needs_compiler = pytest.mark.skipif(backend_for("cpu") != "compiled", reason="needs the compiled kernels")


@needs_compiler
@pytest.mark.parametrize("name", WALKS)
def test_a_walk_is_within_its_budget(name: str, found: dict[str, list[int]]) -> None:
    assert not (message := above_walk(name, found[name], BUDGETS[name])), message


@needs_compiler
def test_the_objects_of_an_optimizer_are_within_their_budget() -> None:
    found = len(kinds := attached_kinds()), sum(map(len, kinds.values()))
    advice, units = "See which in `python -m benchmarks objects`.", ("kinds of objects", "fields")
    assert not (message := above("An attached optimizer", found, KINDS_AND_FIELDS, units, advice)), message


def check_code_lines(what: str, found: int, budget: int) -> None:
    assert found <= budget, above(what, [found], [budget], ["lines of code"], "Take as many away again.")


LINES, TEST_LINES = by_room(SOURCES), by_room(ROOT / "tests")


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_of_rooms_is_within_its_budget(group: str) -> None:
    check_code_lines(group, sum(LINES[room] for room in GROUPS[group]), CODE_LINES_OF_GROUPS[group])


def test_all_sources_are_within_their_budget() -> None:
    check_code_lines("src/halfstep", LINES.total() - sum(LINES[room] for room in FEATURES), ALL_CODE_LINES)


def test_the_tests_are_within_their_budget() -> None:
    check_code_lines("tests", TEST_LINES.total() - sum(TEST_LINES[room] for room in FEATURES), ALL_TEST_LINES)


@pytest.mark.parametrize("room", FEATURES)
def test_a_feature_is_within_its_own_budget(room: str) -> None:
    check_code_lines(room, LINES[room], FEATURES[room][0])
    check_code_lines(f"tests/{room}", TEST_LINES[room], FEATURES[room][1])


def test_a_walk_above_its_budget_says_by_how_much() -> None:
    way = Walk([("amp/a.py", "f"), ("core/b.py", "g"), ("amp/a.py", "f"), ("core/c.py", "h"), ("core/b.py", "g")])
    assert (way.files, way.returns) == (3, 2)
    numbers = len(way.calls), way.files, way.returns
    assert above_walk("x", numbers, (5, 3, 2)) == ""
    message = above_walk("x", numbers, (4, 3, 0))
    assert message.startswith("The walk 'x' has 5 calls, 1 above its budget of 4 and 2 returns, 2 above its budget of")


def test_only_code_is_counted(tmp_path: Path) -> None:
    code = '"""Why."""\n\nimport os\n\n__all__ = ["f"]\n\n# a comment\ndef f(x):\n    """Doc."""\n'
    code += "    return (\n        x\n    )\n"
    for name, text in {"core/b/a.py": code, "amp/b.py": "y = 2\n", "c.py": "z = 3\n"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert by_room(tmp_path) == {"core": 4, "amp": 1, "top": 1}
