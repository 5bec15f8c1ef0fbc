"""The page of a comparison: what diverges is said and drawn, and names are escaped."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from halfstep.numerics import Comparison, Entry


def entry(module: str, op: str = "mm", **given: Any) -> Entry:
    facts = {"occurrence": 0, "backward": False, "dtype": "float16", "inherited": 0.0, "error": 0.0, "added": 0.0}
    return Entry(module, op, **{**facts, "excess": 0.0, **given})


def page_of(tmp_path: Path, *entries: Entry, **about: Any) -> str:
    Comparison(list(entries), ("fp32.jsonl", "<bf16>.jsonl"), about).report(tmp_path / "page.html")
    return (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.fixture
def diverging() -> list[Entry]:
    return [
        entry("fine", error=1e-3, added=1e-3, excess=1.0),
        entry("<bad>", "sub", error=0.5, inherited=1e-3, added=0.499, excess=400.0, why="cancellation"),
        entry("", "output_grad", backward=True, error=math.inf, added=math.inf, excess=math.inf, why="overflow"),
    ]


def test_the_first_divergence_is_said(tmp_path: Path, diverging: list[Entry]) -> None:
    page = page_of(tmp_path, *diverging, **{"loss scale": 4096.0})
    said = re.search(r'class="note">(.*?)</p>', page)
    assert said is not None
    assert said[1] == (
        "First divergence: &lt;bad&gt;: sub in float16, cancellation: error 0.5, of which inherited 0.001."
    )
    assert "3 tensors in 3 modules. loss scale: 4096.0." in page
    assert "<code>&lt;bf16&gt;.jsonl</code> against <code>fp32.jsonl</code>" in page


def test_the_longest_bar_is_what_adds_most(tmp_path: Path, diverging: list[Entry]) -> None:
    page = page_of(tmp_path, *diverging)
    bars = re.findall(r'<rect x="0" y="2" height="12" width="([\d.]+)%" class="cell (\w+)"', page)
    lengths = [float(length) for length, _ in bars]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == 100.0
    assert [kind for _, kind in bars] == ["high", "high", "normal"]
    (mark,) = {float(at) for at in re.findall(r'<line x1="([\d.]+)%"[^>]*class="edge"', page)}
    assert lengths[1] > mark > lengths[2]


def test_both_pictures_have_names_and_tables(tmp_path: Path, diverging: list[Entry]) -> None:
    page = page_of(tmp_path, *diverging)
    assert page.count('role="img"') == 2
    assert page.count("<details>") == page.count("<table>") == 2
    assert page.count("▲") == 1, "what is infinite is marked at the upper edge"
    assert not re.search(r'(src|href)="', page)


def test_runs_that_agree(tmp_path: Path) -> None:
    page = page_of(tmp_path, entry("same"))
    assert "No module adds more error than roundoff explains." in page
    assert "No tensor has an error." in page


def test_nothing_to_compare_is_a_page_too(tmp_path: Path) -> None:
    page = page_of(tmp_path)
    assert "0 tensors in 0 modules." in page
    assert 'role="img"' not in page


def test_more_modules_than_fit_are_said_to_be_left_out(tmp_path: Path) -> None:
    entries = [entry(f"m{i}", error=1e-3, added=1e-3, excess=float(i)) for i in range(40)]
    page = page_of(tmp_path, *entries)
    assert "These are the 32 of 40 modules that add the most." in page
    assert page.count('<rect x="0" y="2"') == 32


def test_the_command_is_shown(tmp_path: Path) -> None:
    Comparison([]).report(tmp_path / "page.html", command="halfstep compare 'a b' c")
    assert "<code>halfstep compare 'a b' c</code>" in (tmp_path / "page.html").read_text(encoding="utf-8")
