"""``watch`` counts what steps change, whatever the optimizer is and wherever its masters are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import halfstep
from halfstep import amp, optimizers
from tests.support.worlds import HALVES, advance, scaled_step, start_amp, with_optimizer


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)).to(dtype)


def backward(model: nn.Module) -> None:
    dtype = next(model.parameters()).dtype
    model(torch.randn(16, 32).to(dtype)).float().square().mean().backward()


def train(model: nn.Module, optimizer: Any, steps: int = 4) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()


PLAIN = [
    (torch.optim.AdamW, {"foreach": False}),
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.NAdam, {}),
    (optimizers.FusedAdam, {}),
    (optimizers.FusedLAMB, {}),
    (optimizers.FusedNovoGrad, {}),
]


@pytest.mark.parametrize(("kind", "options"), PLAIN)
@pytest.mark.parametrize("lr", [1e-7, 1e-2])
@pytest.mark.filterwarnings("ignore:.*rounds away")
def test_it_measures_what_steps_change(kind: Any, options: dict[str, Any], lr: float) -> None:
    model, optimizer = with_optimizer(net(torch.bfloat16), kind, lr=lr, **options)
    watch = halfstep.watch(optimizer, every=2)
    train(model, optimizer, 3)
    before = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, 1)
    pairs = list(zip(model.parameters(), before, strict=True))
    same = sum(int(((p == old) & (p.grad != 0)).sum()) for p, old in pairs)
    moving = sum(int((p.grad != 0).sum()) for p, _ in pairs)
    found = watch.findings()
    assert watch.fraction == pytest.approx(same / moving, abs=1e-6)
    assert [each.code for each in found] == (["HS101"] if same / moving >= 0.1 else [])


def attached(level: str, fused: bool, dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
    return start_amp(net(), torch.optim.AdamW, level, dtype=dtype, fused=fused, lr=1e-5)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_masters_lose_nothing(level: str, fused: bool, dtype: torch.dtype) -> None:
    model, optimizer = attached(level, fused, dtype)
    watch = halfstep.watch(optimizer, every=1)
    for _ in range(3):
        loss = model(torch.randn(16, 32)).square().mean()
        advance(loss, optimizer)
        assert watch.findings() == []
    assert watch.fraction is not None
    assert watch.fraction < 0.01


def test_attached_after_it_is_watched() -> None:
    model, optimizer = with_optimizer(net(), torch.optim.AdamW, lr=1e-7)
    watch = halfstep.watch(optimizer, every=1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O3", dtype="bfloat16", verbosity=0)
    train(model, optimizer)
    assert [each.severity for each in watch.findings()] == ["error"]


@pytest.mark.parametrize("fused", [True, False])
def test_a_skipped_step_does_not_count(fused: bool) -> None:
    model, optimizer = attached("O2", fused, torch.float16)
    watch = halfstep.watch(optimizer, every=1)
    scaled_step(model(torch.full((16, 32), torch.inf)).square().mean(), optimizer)
    assert watch.findings() == []
    assert watch.fraction is None


@pytest.mark.filterwarnings("ignore:.*rounds away")
def test_a_step_that_another_scaler_skips_does_not_count() -> None:
    model, optimizer = with_optimizer(net(), optimizers.FusedAdam, lr=1e-3)
    watch = halfstep.watch(optimizer, every=1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.full((16, 32), torch.inf)).square().mean()).backward()
    scaler.step(optimizer)
    assert watch.findings() == []
    assert watch.fraction is None


def test_weights_without_gradient_do_not_count() -> None:
    tables = nn.ModuleList([nn.Embedding(100, 4), nn.Embedding(100, 4, sparse=True)])
    optimizer = torch.optim.SGD(tables.parameters(), lr=1.0)
    watch = halfstep.watch(optimizer, every=1)
    sum(table(torch.tensor([3, 5])).sum() for table in tables).backward()
    optimizer.step()
    assert watch.findings() == []
    assert watch.fraction == 0.0


def test_only_every_nth_step_is_looked_at_and_none_after_remove() -> None:
    model, optimizer = with_optimizer(net(torch.bfloat16), torch.optim.SGD, lr=1e-9)
    watch = halfstep.watch(optimizer, every=3)
    train(model, optimizer, 2)
    assert watch.findings() == []
    train(model, optimizer, 1)
    assert watch.fraction is None  # nobody has asked, and no later step has looked
    (found,) = watch.findings()
    assert found.where == "SGD (4 tensors, 2632 weights)"
    assert watch.fraction == 1.0
    watch.remove()
    optimizer.param_groups[0]["lr"] = 1.0
    train(model, optimizer, 3)
    assert watch.findings() == [found]
    assert watch.fraction == 1.0


def test_what_is_lost_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = with_optimizer(net(torch.bfloat16), torch.optim.SGD, lr=1e-9)
    watch = halfstep.watch(optimizer, every=1)
    train(model, optimizer, 4)
    watch.findings()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "HS101 error at SGD (4 tensors, 2632 weights): 100 % of the updates round to nothing" in caplog.text
    assert "halfstep.watch: " in caplog.text
    assert watch.findings()[0].fix in caplog.text
    assert "halfstep.check(" not in caplog.text


def test_a_watched_optimizer_can_be_copied() -> None:
    model, optimizer = with_optimizer(net(), torch.optim.AdamW)
    watch = halfstep.watch(optimizer, every=1)
    other, copied = copy.deepcopy((model, optimizer))
    train(other, copied)
    assert watch.findings() == []
    assert watch.fraction is None


def test_training_is_the_same() -> None:
    ends = []
    for watched in (False, True):
        torch.manual_seed(0)
        model, optimizer = with_optimizer(net(torch.bfloat16), torch.optim.AdamW)
        if watched:
            halfstep.watch(optimizer, every=1)
        train(model, optimizer)
        ends.append([*model.state_dict().values(), torch.get_rng_state()])
    assert all(map(torch.equal, *ends))
