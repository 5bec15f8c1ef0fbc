"""``diagnose`` trains copies only, prints twelve lines at most, and refuses what it cannot run."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import halfstep
from halfstep import Finding, amp
from halfstep.cli.run_numerics import Monitors
from halfstep.diagnosis import Diagnosis, diagnose
from tests.support.python import python

from .broken_scripts import SCRIPTS


class Trial:
    """A training, whose step is a method or a function, with the optimizer's step or without."""

    def __init__(self, level: str, dtype: torch.dtype) -> None:
        model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.model, self.optimizer = amp.initialize(model, optimizer, opt_level=level, dtype=dtype, verbosity=0)
        self.x, self.y, self.seen = torch.randn(16, 8), torch.randn(16, 1), [0]

    def loss(self) -> torch.Tensor:
        self.seen[0] += 1
        return nn.functional.mse_loss(self.model(self.x).float(), self.y)

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.loss()
        with amp.scale_loss(loss, self.optimizer) as scaled:
            scaled.backward()
        self.optimizer.step()
        return loss


def as_function(trial: Trial) -> Any:
    model, optimizer, step = trial.model, trial.optimizer, trial.step
    return lambda: (model, optimizer, step())[2]


WAYS = {"a method": lambda t: t.step, "a closure": as_function, "the loss": lambda t: t.loss}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("level", "dtype"), [("O2", torch.float16), ("O2", torch.bfloat16), ("O1", torch.float16)])
def test_nothing_changes(level: str, dtype: torch.dtype, way: str) -> None:
    one, other = (torch.manual_seed(0) and Trial(level, dtype) for _ in range(2))
    for trial in (one, other):
        torch.manual_seed(1)
        trial.step()
    before = torch.get_rng_state()
    result = halfstep.diagnose(WAYS[way](one), one.model, one.optimizer)
    assert before.equal(torch.get_rng_state())
    assert "copies" in str(result).splitlines()[0]
    assert one.seen == [1]
    for trial in (one, other):
        torch.manual_seed(2)
        trial.losses = [float(trial.step().detach()) for _ in range(3)]  # type: ignore[attr-defined]
    assert one.losses == other.losses  # type: ignore[attr-defined]
    assert all(map(torch.equal, one.model.state_dict().values(), other.model.state_dict().values()))
    assert amp.steps_skipped(one.optimizer) == amp.steps_skipped(other.optimizer)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_healthy_training_has_no_problem(level: str, dtype: torch.dtype) -> None:
    trial = Trial(level, dtype)
    result = halfstep.diagnose(trial.step, trial.model, trial.optimizer)
    assert [each for each in result.findings if each.severity != "note"] == []
    assert f"nothing found in {len(result.losses)} steps" in str(result)


def test_model_and_optimizer_are_found() -> None:
    trial = Trial("O2", torch.float16)
    trial.x[0, 0], teacher = torch.nan, nn.Linear(8, 1)  # which nothing trains
    step = partial(lambda of: (of(torch.ones(1, 8)), trial.step()), teacher)
    assert "HS122 error    The batch holds NaN: input 0" in str(halfstep.diagnose(step))


@pytest.mark.parametrize("grad", [True, False])
def test_only_passes_with_gradients_are_of_the_training(grad: bool) -> None:
    trial, time = Trial("O1", torch.bfloat16), torch.full((16, 8), 300.0).bfloat16()
    step = partial(lambda of: (torch.set_grad_enabled(grad)(of.model)(time), of.step()), trial)
    found = halfstep.diagnose(step, trial.model.eval(), trial.optimizer).findings
    assert any(each.code == "HS118" for each in found) is grad


def test_a_disabled_scaler_scales_no_gradients() -> None:
    model, scaler = nn.Linear(8, 1), torch.amp.GradScaler("cpu", enabled=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def step() -> None:
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 8)).square().sum()).backward()
        optimizer.step()

    assert [each for each in halfstep.diagnose(step, model, optimizer).findings if each.severity == "error"] == []


@pytest.mark.exhaustive
def test_a_script_runs_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "train.py"
    path.write_text("1 / 0")
    with pytest.raises(halfstep.HalfstepError, match=r"train.py failed:\n(.*\n)*ZeroDivisionError"):
        halfstep.diagnose(path)
    run = SimpleNamespace(run=lambda command, **_: python(*command[1:]))  # forked: torch need not be imported again
    monkeypatch.setattr(sys.modules[diagnose.__module__], "subprocess", run)
    path.write_text(SCRIPTS[-1].text(steps=4))
    result = halfstep.diagnose(path)
    assert "in a process of its own" in str(result)
    assert result.findings[0].code == "HS122"


def test_a_recipe_that_saturates_is_first_and_its_fix_helps() -> None:
    for amax, saturates in (("delayed", True), ("current", False)):
        trial = Trial("O1", torch.bfloat16)
        amp.set_products(trial.model, f"fp8_tensorwise; layers=all; amax={amax}")
        step = partial(lambda grows: (grows.x.mul_(1.5), grows.step()), trial)
        first = halfstep.diagnose(step, trial.model, trial.optimizer).findings[0]
        assert (first.code == "HS128" and "(products=fp8_tensorwise; amax=delayed; " in first.message) is saturates


@pytest.mark.parametrize("count", [0, 1, 3, 9])
def test_twelve_lines_at_most(count: int) -> None:
    found = [Finding(f"HS{100 + i}", "error", "x", "word " * 60, {}, "fix " * 60) for i in range(count)]
    lines = str(Diagnosis(found, 8)).splitlines()
    assert len(lines) <= 12
    assert all(len(line) <= 120 for line in lines)
    assert (f"HS{100 + count - 1}" in lines[-1]) == (count > 2)


def test_a_page(tmp_path: Path) -> None:
    page, found = tmp_path / "a" / "page.html", Finding("HS101", "error", "layer", "the message", {}, "the fix")
    Diagnosis([found], 8, [3.0, 2.0, float("nan")]).report(page)
    text = page.read_text(encoding="utf-8")
    assert all(each in text for each in ("HS101 error", "the message", "layer", "the fix", "1 problem in 8 steps"))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((3,), TypeError, "not int"),
        (("nowhere.py",), ValueError, "nowhere.py"),
        ((lambda: None, 3), TypeError, "torch.nn.Module"),
        ((lambda: None, nn.Linear(2, 2), 3), TypeError, "torch.optim.Optimizer"),
        ((lambda: None,), halfstep.HalfstepError, "called no model"),
        (("x.py", nn.Linear(2, 2)), ValueError, "leave both out"),
    ],
)
def test_what_is_refused(arguments: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        halfstep.diagnose(*arguments)


def test_the_first_twenty_steps_are_sampled_and_then_every_hundredth() -> None:
    monitors, model = Monitors(every=None), torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitors.see_step(optimizer, (), {})
    for _ in range(102):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert sorted({row.step for row in monitors.rows() if row.tensor == "update"}) == [*range(20), 100]
