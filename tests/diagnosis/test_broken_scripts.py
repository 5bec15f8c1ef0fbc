"""Scripts that are broken on purpose: ``diagnose`` names the cause first, and the fix that it prints works."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch.distributed as dist

import halfstep
from halfstep import amp

from .broken_scripts import SCRIPTS, Script

CAUSES, FIXES = 63, 63
"""Of 63 scripts: those whose cause is first, and of these those whose printed fix makes them train."""

_STARTS = ("overflow in attention, mlp", "two optimizers", "lost updates, attention", "bad batch, cnn")
QUICK = [each for each in SCRIPTS if each.name.startswith((*_STARTS, "forgotten zero", "dropout of", "denormals, att"))]


def run(script: Script, **options: Any) -> dict[str, Any]:
    amp.deactivate()  # the casts of the script before
    if dist.is_initialized():
        dist.destroy_process_group()
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(script.text(**options), script.name, "exec"), names)
    return names


def judged(script: Script) -> tuple[bool, bool]:
    """Whether the first finding has the cause, and whether the script trains once it does what the fix says."""
    names = run(script)
    found = halfstep.diagnose(names["step"], names["model"], [names[name] for name in script.names]).findings
    if not found:
        return False, False
    first = found[0]
    said = f"{first.code} {first.severity} {first.where} {first.message}"
    right = re.search(script.cause, said) is not None
    if not right or re.search(script.fix, first.fix) is None:
        return right, False
    mended = run(script, mended=True, steps=30)
    losses = mended["losses"]
    again = halfstep.diagnose(mended["step"], mended["model"], [mended[name] for name in script.names]).findings
    gone = all(each.code != first.code or each.severity != first.severity for each in again)
    return right, gone and all(map(math.isfinite, losses[-5:])) and losses[-1] < losses[0]


@pytest.mark.parametrize("script", QUICK, ids=lambda each: each.name)
def test_the_cause_is_first_and_its_fix_works(script: Script) -> None:
    assert judged(script) == (True, True)


def test_every_fault_has_three_variants() -> None:
    assert len(SCRIPTS) == 63
    assert len({(each.fault, each.model) for each in SCRIPTS}) == 63


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
def test_most_causes_are_first_and_most_fixes_work() -> None:
    results = {script.name: judged(script) for script in SCRIPTS}
    wrong = [name for name, (right, works) in results.items() if not (right and works)]
    assert sum(right for right, _ in results.values()) >= CAUSES, wrong
    assert sum(works for _, works in results.values()) >= FIXES, wrong
