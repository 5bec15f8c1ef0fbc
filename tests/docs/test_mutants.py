"""``tools/mutants.py``: what is changed in a source file, and what is left alone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tools.mutants import mutants_of

CHANGED = {
    "if a < b:\n    pass": ["if a <= b:", "if not (a < b):"],
    "if a is None:\n    pass": ["if a is not None:"],
    "x = a <= b <= c": ["x = a < b <= c", "x = a <= b < c"],
    "x = a not in b": ["x = a in b"],
    "x = a and b or c": ["x = a and b and c", "x = a or b or c"],
    "x = [a for a in b if a.c]": ["x = [a for a in b if not (a.c)]"],
    "x = (a) + (b) * 2": ["x = (a) + (b) * (1)", "x = (a) + (b) * 3", "x = (a) + (b) / 2", "x = (a) - (b) * 2"],
    "x = not a": ["x = a"],
    "x = min(a, b)": ["x = max(a, b)"],
    "x = f(a)": ["x = a"],
    "x = a().b(c)": ["x = a()"],
    "x = f(a, b, key=True)": ["x = f(a, b)", "x = f(a, b, key=False)"],
    "f(key=a, other=b)": ["f(key=a)", "f(other=b)", "pass"],
    "def f(x=True):\n    return x": ["def f(x=False):", "return None"],
    "def f(x):\n    y = 'a'\n    y = x\n    x.y = y\n    x += y": ["pass", "pass", "pass", "x -= y"],
}

LEFT_ALONE = [
    '"""Text with 1 + 1."""', "import a.b as c", "from a import b", "__all__ = ['a', True]",
    "def f(x: int = None) -> list[1]: ...", "@cache(maxsize=1)\nclass A: ...", "assert a < 1",
    "raise ValueError(f'{a + 1}')", "x = f'{a + 1}'", "x = UsageError(f'{a + 1}')", "def f(a):\n    b = 'c'",
    "x = zip(a, b, strict=True)", "x = list(a)", "if TYPE_CHECKING:\n    f(1)", "import a\nx = a.b(c)",
]  # fmt: skip


def changes(tmp_path: Path, source: str) -> list[str]:
    path = tmp_path / "source.py"
    path.write_text(source + "\n")
    mutants = mutants_of(str(path))
    for mutant in mutants:
        ast.parse(mutant.mutated)
        assert mutant.mutated.decode() != source + "\n"
        assert mutant.line in mutant.lines
    return sorted(mutant.key[2] for mutant in mutants)


@pytest.mark.parametrize("source", CHANGED)
def test_each_change_is_one_mutant(tmp_path: Path, source: str) -> None:
    assert changes(tmp_path, source) == sorted(CHANGED[source])


@pytest.mark.parametrize("source", LEFT_ALONE)
def test_what_no_test_need_see_is_left_alone(tmp_path: Path, source: str) -> None:
    assert changes(tmp_path, source) == []


def test_a_mutant_knows_its_file_its_lines_and_the_text_before_and_after(tmp_path: Path) -> None:
    path = tmp_path / "é.py"
    path.write_text("# é\nx = f(\n    'é', 1 < a,\n)\n")
    (comparison,) = (mutant for mutant in mutants_of(str(path)) if mutant.text == b"<=")
    assert str(comparison) == f"{path}:3  'é', 1 < a,  ->  'é', 1 <= a,"
    assert comparison.lines == range(2, 5)
    assert comparison.mutated.decode() == "# é\nx = f(\n    'é', 1 <= a,\n)\n"
