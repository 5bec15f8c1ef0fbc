"""The machines, for 40 cases each; ``make fuzz MINUTES=10`` runs them for as long as one likes."""

from __future__ import annotations

import pytest
from hypothesis.stateful import run_state_machine_as_test

from . import MACHINES, options


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MACHINES)
def test_forty_cases(name: str) -> None:
    if name == "casts":
        pytest.importorskip("expecttest", reason="torch's database of ops needs expecttest")
    before = MACHINES[name].cases
    steps = 4 if name == "casts" else None  # each makes a table of rules
    run_state_machine_as_test(MACHINES[name], settings=options(MACHINES[name], 40, shrink=False, steps=steps))
    assert MACHINES[name].cases - before >= 40
