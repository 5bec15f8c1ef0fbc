"""Faults of six kinds, at random places of five small models: the documented tool names cause and module first."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.numerics.causes import CAUSES, draw, named

RIGHT = 0.95
"""The least share of the faults whose cause and module are named first."""


@pytest.mark.parametrize("cause", CAUSES)
def test_a_cause_and_its_module_are_named_first(cause: str) -> None:
    case = draw(random.Random(3), cause)
    assert named(case) == (case.cause, case.module)


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_95_of_100_causes_are_named_first(request: pytest.FixtureRequest) -> None:
    """``make combinations`` draws 100 faults, and ``make test`` 18."""
    dice, count = random.Random(0), 100 if request.config.getoption("combinations") == "all" else 18
    wrong = Counter[tuple[str, ...]]()
    for i in range(count):
        case = draw(dice, list(CAUSES)[i % len(CAUSES)])
        found = named(case)
        if found != (case.cause, case.module):
            wrong[(case.cause, case.name, case.module, *found)] += 1
    assert count - wrong.total() >= RIGHT * count, wrong
