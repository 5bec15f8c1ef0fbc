"""All objects of halfstep's modules that change while it runs are in a table of docs/side-effects.md, with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.design_tables import differences
from tests.support.module_state import module_state

SOURCES = Path(__file__).parents[2] / "src" / "halfstep"
TABLE = "Objects of modules that change"


def test_every_object_that_changes_is_in_the_table() -> None:
    problems = differences(TABLE, module_state(SOURCES, leave_out={"compat", "paddle"}))
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("x = 1\ndef f():\n    global x\n    x = 2", {"x"}),
        ("x = {}", {"x"}),
        ("x: list[int] = []", {"x"}),
        ("x = {1: 2}\ndef f():\n    x[1] = 3", {"x"}),
        ("x = [1]\ndef f():\n    x.append(2)", {"x"}),
        ("x = {1}\nclass C:\n    def f(self):\n        del self.y\n        x.discard(1)", {"x"}),
        ("import weakref\nx: dict = weakref.WeakKeyDictionary()", {"x"}),
        ("import threading\nx = threading.Lock()", {"x"}),
        ("class C: ...\nx = C()", {"x"}),
        ("class C:\n    y: dict = {}", {"C.y"}),
        ("x = {1: 2}\nx[2] = 3\ndef f():\n    return x[1]", set()),
        ("@dataclass(frozen=True)\nclass C: ...\nx = C()", set()),
        ("x = (1, 2)\n__all__ = ['f']\nT = TypeVar('T')\ndef f(x):\n    y = {}\n    y[1] = 2", set()),
    ],
)
def test_what_changes_is_found(text: str, found: set[str], tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(text)
    assert module_state(tmp_path, leave_out=set()) == {("a.py", name) for name in found}


def test_what_another_module_changes_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("hooks = [print]\ntable = {1: 2}")
    (tmp_path / "b.py").write_text("from .a import hooks, table\ndef f():\n    hooks.append(table[1])")
    (tmp_path / "compat").mkdir()
    (tmp_path / "compat" / "c.py").write_text("x = []")
    assert module_state(tmp_path, leave_out={"compat"}) == {("a.py", "hooks")}
