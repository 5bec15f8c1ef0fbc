"""The cases that a run of the tests leaves out: of all others, every two values of two parameters meet in one."""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path

import pytest

from tests.support.combinations import STRENGTHS, chosen, covering

TABLES = {
    "levels, dtypes and optimizers": list(product("0123", "hb", "abcde", "tf")),
    "some cases are not there": [row for row in product("0123", "hb", "abc") if row[:2] != ("1", "h")],
    "one parameter": [("a",), ("b",)],
    "columns that go together": [(a, a.upper(), b) for a in "abc" for b in "xyz"],
}


def meetings(rows: list[tuple[str, ...]], strength: int) -> set[object]:
    strength = min(strength, len(rows[0]))
    return {(at, tuple(row[i] for i in at)) for row in rows for at in combinations(range(len(rows[0])), strength)}


@pytest.mark.parametrize("strength", [1, 2, 3])
@pytest.mark.parametrize("table", TABLES)
def test_whatever_meets_in_a_case_meets_in_one_that_is_kept(table: str, strength: int) -> None:
    rows = TABLES[table]
    kept = [rows[i] for i in covering(rows, strength)]
    assert meetings(kept, strength) == meetings(rows, strength)
    assert len(set(kept)) == len(kept)


def test_few_cases_are_kept() -> None:
    rows = TABLES["levels, dtypes and optimizers"]
    assert [len(covering(rows, strength)) for strength in (1, 2, 4)] == [5, 20, len(rows)]


CASES = """
import pytest

@pytest.mark.{}
@pytest.mark.parametrize("a", range(4))
@pytest.mark.parametrize("b", range(3))
@pytest.mark.parametrize("c", range(2))
def test(a, b, c): pass
"""


@pytest.mark.parametrize(
    ("mark", "found"), [("exhaustive", [4, 12, 24]), ("costly", [4, 4, 24]), ("every_combination", [24, 24, 24])]
)
def test_a_mark_says_how_many_cases_are_run(
    mark: str, found: list[int], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = tmp_path / f"test_{mark}_cases.py"
    path.write_text(CASES.format(mark))
    module = pytest.Module.from_parent(request.session, path=path)
    items = [item for item in module.collect() if isinstance(item, pytest.Item)]
    assert len(items) == 24
    assert [len(chosen(items, strength)) for strength in STRENGTHS.values()] == found
