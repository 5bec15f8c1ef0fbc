"""Numbers with their nouns, and lists of names."""

from __future__ import annotations

import pytest

from halfstep.core.text import counted, listed


@pytest.mark.parametrize(
    ("count", "nouns", "text"),
    [
        (0, ("step",), "0 steps"),
        (1, ("step",), "1 step"),
        (2, ("step",), "2 steps"),
        (1437, ("image",), "1,437 images"),
        (1, ("loss", "losses"), "1 loss"),
        (2, ("loss", "losses"), "2 losses"),
    ],
)
def test_a_number_and_its_noun(count: int, nouns: tuple[str, ...], text: str) -> None:
    assert counted(count, *nouns) == text


@pytest.mark.parametrize(("names", "text"), [("", ""), ("abc", "a, b, c"), ("abcde", "a, b, c and 2 more")])
def test_many_names_are_cut_and_counted(names: str, text: str) -> None:
    assert listed(list(names)) == text
    assert listed(list(names), most=5) == ", ".join(names)
