"""Numbers with their nouns, and lists of names."""

from __future__ import annotations

import pytest

from halfstep.core.text import counted, listed


def test_a_number_and_its_noun() -> None:
    assert [counted(n, "step") for n in (0, 1, 2, 1437)] == ["0 steps", "1 step", "2 steps", "1,437 steps"]
    assert [counted(n, "loss", "losses") for n in (1, 2)] == ["1 loss", "2 losses"]


@pytest.mark.parametrize(("names", "text"), [("", ""), ("abc", "a, b, c"), ("abcde", "a, b, c and 2 more")])
def test_many_names_are_cut_and_counted(names: str, text: str) -> None:
    assert listed(list(names)) == text
    assert listed(list(names), most=5) == ", ".join(names)
