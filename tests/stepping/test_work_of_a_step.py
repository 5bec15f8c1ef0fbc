"""What a fused step asks of a GPU: few launches, few small ops, and nothing of the host but numbers that changed.

A fake CUDA device stands in for it, so these are counts and no times. The limits are the counts of today.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from halfstep import amp, optimizers
from tests.support.device_work import DeviceWork, fake_steps
from tests.support.fake_cuda import READS_THE_HOST
from tests.support.worlds import BF16

# Fused optimizers compare addresses of weights on the host, which no device has to tell.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor"),
    pytest.mark.timeout(900),  # counting goes through every op in Python
]


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the kernels that are launched on a fake CUDA device."""
    with fake_steps(monkeypatch) as recorded:
        yield recorded


def parameters(count: int = 3) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(8, 8, dtype=BF16), requires_grad=False) for _ in range(count)]


def backward(params: list[torch.nn.Parameter]) -> None:
    for param in params:
        param.grad = torch.ones_like(param)


def steady(
    params: list[torch.nn.Parameter], step: Callable[[], Any], launches: list[str], steps: int = 2
) -> DeviceWork:
    """The work of a step that is not among the first."""
    for _ in range(steps):
        backward(params)
        step()
    backward(params)
    launches.clear()
    with DeviceWork() as work:
        step()
    return work


SPLIT = {"master_weights": "split"}
STEPS: dict[str, tuple[Callable[[Any], Any], list[str], int]] = {
    "FusedAdam": (lambda p: optimizers.FusedAdam(p, **SPLIT), ["adam"], 12),
    "FusedAdam, clipped": (
        lambda p: optimizers.FusedAdam(p, max_grad_norm=1.0, **SPLIT), ["read_gradients", "adam"], 21
    ),
    "FusedAdam, stochastic": (lambda p: optimizers.FusedAdam(p, rounding="stochastic"), ["adam"], 21),
    "FusedSGD": (lambda p: optimizers.FusedSGD(p, lr=0.1, **SPLIT), ["sgd"], 0),
    "FusedSGD, momentum": (lambda p: optimizers.FusedSGD(p, lr=0.1, momentum=0.9, **SPLIT), ["momentum_sgd"], 0),
    "FusedLAMB": (lambda p: optimizers.FusedLAMB(p, **SPLIT), ["read_gradients", "lamb_moments", "lamb_apply"], 32),
    "FusedNovoGrad": (lambda p: optimizers.FusedNovoGrad(p, **SPLIT), ["read_gradients", "novograd"], 27),
    "FusedAdagrad": (lambda p: optimizers.FusedAdagrad(p, **SPLIT), ["adagrad"], 3),
}  # fmt: skip
"""An optimizer, the kernels that its step launches, and how many small ops it needs for its numbers."""


@pytest.mark.parametrize("count", [1, pytest.param(100, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_at_most_three_launches_and_copies_nothing(name: str, count: int, launches: list[str]) -> None:
    make, expected, ops = STEPS[name]
    params = parameters(count)
    work = steady(params, make(params).step, launches)
    assert launches == expected
    assert len(launches) <= 3
    assert work.copies == []
    assert sum(work.ops.values()) <= ops, work.ops


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("name", ["FusedAdam", "FusedAdam, clipped", "FusedLAMB", "FusedSGD"])
def test_a_step_of_grad_scaler(name: str, clip: bool, launches: list[str]) -> None:
    make, expected, _ = STEPS[name]
    params = parameters()
    optimizer, scaler = make(params), amp.GradScaler()

    def step() -> None:
        scaler.scale(torch.ones(()))
        if clip:
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()

    work = steady(params, step, launches)
    assert launches == expected
    assert work.copies == []


def test_a_step_of_scale_loss(launches: list[str]) -> None:
    model = torch.nn.Linear(4, 2, dtype=torch.float32)
    params = list(model.parameters())
    optimizer = optimizers.FusedAdam(params, max_grad_norm=1.0)
    amp.initialize(model, optimizer, opt_level="O1", loss_scale="dynamic", verbosity=0)

    def step() -> None:
        optimizer.zero_grad()
        with amp.scale_loss(torch.ones(()), optimizer):
            backward(params)
        optimizer.step()

    work = steady(params, step, launches)
    assert launches == ["read_gradients", "adam"]
    assert work.copies == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", STEPS)
def test_a_number_that_changes_is_one_fill(name: str, launches: list[str]) -> None:
    make, _, _ = STEPS[name]
    params = parameters()
    optimizer = make(params)
    before = steady(params, optimizer.step, launches)
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    after = steady(params, optimizer.step, launches, steps=0)
    assert after.ops["aten::fill_.Scalar"] - before.ops["aten::fill_.Scalar"] <= 1
    assert sum(after.ops.values()) - sum(before.ops.values()) <= 1
    assert after.copies == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["FusedAdam", "FusedSGD, momentum", "FusedLAMB", "FusedNovoGrad", "FusedAdagrad"])
def test_a_tensor_lr_is_read_on_the_device_in_every_step(name: str, launches: list[str]) -> None:
    """So a CUDA graph that is replayed sees what a schedule wrote into it."""
    make, _, _ = STEPS[name]
    params = parameters()
    optimizer = make(params)
    lr = torch.full((), 0.125)
    for group in optimizer.param_groups:
        group["lr"] = lr
    for work in (steady(params, optimizer.step, launches), steady(params, optimizer.step, launches, steps=0)):
        assert id(lr) in work.read
        assert work.copies == []
        assert work.ops["aten::fill_.Scalar"] == 0


def test_a_number_of_a_captured_step_is_written_again(launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a graph captures does not run: so the number is not there yet when an ordinary step comes next."""
    params = parameters()
    optimizer = optimizers.FusedSGD(params, lr=0.5, **SPLIT)
    steady(params, optimizer.step, launches)
    optimizer.param_groups[0]["lr"] = 0.25
    with monkeypatch.context() as capturing:
        capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert steady(params, optimizer.step, launches, steps=0).ops["aten::fill_.Scalar"] == 1
    assert steady(params, optimizer.step, launches, steps=0).ops["aten::fill_.Scalar"] == 1
    assert steady(params, optimizer.step, launches, steps=0).ops["aten::fill_.Scalar"] == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", STEPS)
def test_the_step_count_moves_on_the_device(name: str, launches: list[str]) -> None:
    make, _, _ = STEPS[name]
    params = parameters()
    optimizer = make(params)
    steady(params, optimizer.step, launches)
    steps = {value.device.type for state in optimizer.state.values() for key, value in state.items() if key == "step"}
    assert steps <= {"cuda"}
    assert bool(steps) is (not name.startswith("FusedSGD"))


class Reading(optimizers.FusedAdam):
    """An update that waits for the device."""

    def _update(self, group: Any, rows: Any, step: Any) -> None:
        if step.t.max().item() > 0:
            super()._update(group, rows, step)


class Copying(optimizers.FusedAdam):
    """An update that brings a number from the host."""

    def _update(self, group: Any, rows: Any, step: Any) -> None:
        lr = torch.tensor(group["lr"], device="cpu").to(rows.device)
        super()._update({**group, "lr": lr}, rows, step)


def test_a_step_that_reads_or_copies_is_noticed(launches: list[str]) -> None:
    params = parameters()
    with pytest.raises(READS_THE_HOST):
        steady(params, Reading(params, **SPLIT).step, launches)
    assert steady(params, Copying(params, **SPLIT).step, launches).copies == ["aten::_to_copy"]
