"""The machines, for 200 cases each; ``make fuzz MINUTES=10`` runs them for as long as one likes."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from . import MACHINES


def run(name: str, count: int) -> None:
    options = settings(
        max_examples=count, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
    )
    before = MACHINES[name].cases
    run_state_machine_as_test(MACHINES[name], settings=options)
    assert MACHINES[name].cases - before >= count


@pytest.mark.parametrize("name", MACHINES)
def test_ten_cases(name: str) -> None:
    run(name, 10)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MACHINES)
def test_two_hundred_cases(name: str) -> None:
    run(name, 200)
