"""Scripts that are broken on purpose: ``diagnose`` names the cause first, and the fix that it prints works."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch.distributed as dist

import halfstep
from halfstep import Finding, amp

from .broken_scripts import SCRIPTS, Script

QUICK = ("two optimizers, attention", "lost updates, attention", "forgotten zero_grad, mlp", "denormals, attention")


def run(script: Script, **options: Any) -> dict[str, Any]:
    amp.deactivate()  # the casts of the script before
    if dist.is_initialized():
        dist.destroy_process_group()
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(script.text(**options), script.name, "exec"), names)
    return names


def diagnosed(names: dict[str, Any], script: Script) -> list[Finding]:
    optimizers = [names[name] for name in script.names]
    return halfstep.diagnose(names["step"], names["model"], optimizers).findings


def cases(scripts: Sequence[Script]) -> list[Any]:
    slow = [pytest.mark.exhaustive, pytest.mark.filterwarnings("ignore")]
    return [pytest.param(each, marks=[] if each.name.startswith(QUICK) else slow, id=each.name) for each in scripts]


@pytest.mark.parametrize("script", cases(SCRIPTS))
def test_the_cause_is_first_and_its_fix_trains(script: Script) -> None:
    first = diagnosed(run(script), script)[0]
    assert re.search(script.cause, f"{first.code} {first.severity} {first.where} {first.message}")
    assert re.search(script.fix, first.fix)
    losses = run(script, mended=True, steps=30)["losses"]
    assert all(map(math.isfinite, losses[-5:]))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("script", cases([each for each in SCRIPTS if each.model == "mlp"]))
def test_the_fix_removes_the_finding(script: Script) -> None:
    mended = run(script, mended=True, steps=30)
    found = [f"{each.code} {each.severity} {each.where} {each.message}" for each in diagnosed(mended, script)]
    assert not any(re.search(script.cause, each) for each in found)


def test_every_fault_has_three_variants() -> None:
    assert len(SCRIPTS) == 63
    assert len({(each.fault, each.model) for each in SCRIPTS}) == 63
