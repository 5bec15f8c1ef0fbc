"""Optimizers that write to weights in other methods than ``step`` write to masters; those that miss them are told."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from halfstep import amp
from halfstep.core.errors import UsageError
from tests.support.worlds import in_both_halves, scaled_backward, start_amp, with_optimizer


class Optimizer(torch.optim.Optimizer):
    """With a rate, and a list of its groups' parameters."""

    def __init__(self, params: Any, lr: float = 1e-4) -> None:
        super().__init__(params, {"lr": lr})
        self.own = self.present()

    def present(self) -> list[Any]:
        return [p for group in self.param_groups for p in group["params"]]

    @property
    def lr(self) -> float:
        return float(self.param_groups[0]["lr"])


class Averaging(Optimizer):
    """Trains an average of two points, and steps one of them: ScheduleFree in short."""

    def train(self) -> None:
        self._move(2.0)

    def eval(self) -> None:
        self._move(0.5)

    @torch.no_grad()
    def _move(self, factor: float) -> None:
        for p in self.present():
            if "z" in self.state[p]:
                p.lerp_(end=self.state[p]["z"], weight=1.0 - factor)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.present():
            z = self.state[p].setdefault("z", p.clone())
            z.sub_(p.grad, alpha=self.lr)
            p.lerp_(end=z, weight=0.25)


class Perturbing(Optimizer):
    """Steps with the gradient of a place near by: SAM in short."""

    @torch.no_grad()
    def first_step(self) -> None:
        for p in self.present():
            self.state[p]["before"] = p.data.clone()
            p.add_(p.grad, alpha=1.5 * self.lr)

    @torch.no_grad()
    def second_step(self) -> None:
        for p in self.present():
            p.data = self.state[p]["before"]
        self.step()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.present():
            p.sub_(p.grad, alpha=self.lr)

    def count(self) -> int:
        return len(self.present())

    def groups(self) -> Any:
        return self.param_groups


def start(make: Callable[[Any], Any], half: torch.dtype | None) -> tuple[Any, Any]:
    model = nn.Linear(8, 8, bias=False)
    nn.init.ones_(model.weight)
    options: dict[str, Any] = {"opt_level": "O0"} if half is None else {"opt_level": "O2", "dtype": half}
    return amp.initialize(model, make(model.parameters()), loss_scale=1.0, verbosity=0, **options)


def backward(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    scaled_backward(model(torch.ones(2, 8)).float().sum(), optimizer)


def truth(model: Any) -> torch.Tensor:
    return model.state_dict()["weight"].float().clone()  # type: ignore[no-any-return]


def averaged(model: Any, optimizer: Any) -> list[torch.Tensor]:
    seen = []
    for _ in range(3):
        optimizer.train()
        for _ in range(4):
            backward(model, optimizer)
            optimizer.step()
        optimizer.eval()
        seen.append(truth(model))
    return seen


def perturbed(model: Any, optimizer: Any) -> list[torch.Tensor]:
    seen = []
    for _ in range(5):
        backward(model, optimizer)
        optimizer.first_step()
        seen.append(truth(model))
        backward(model, optimizer)
        optimizer.second_step()
        seen.append(truth(model))
    return seen


WAYS: dict[str, tuple[type, Callable[[Any, Any], list[torch.Tensor]]]] = {
    "ScheduleFree": (Averaging, averaged),
    "SAM": (Perturbing, perturbed),
}


@in_both_halves
@pytest.mark.parametrize("copied", [False, True], ids=["itself", "copied"])
@pytest.mark.parametrize("way", WAYS)
def test_any_public_method_of_an_optimizer_writes_to_masters(way: str, copied: bool, half: torch.dtype) -> None:
    make, run = WAYS[way]
    model, optimizer = start(make, half)
    if copied:
        model, optimizer = copy.deepcopy((model, optimizer))
    for found, expected in zip(run(model, optimizer), run(*start(make, None)), strict=True):
        torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-6)
        assert not torch.equal(found, found.to(half).float())
    assert torch.equal(model.weight, truth(model).to(half))
    assert [id(p) for p in optimizer.state] == [id(model.weight)]


def test_a_method_returns_parameters_and_not_their_masters() -> None:
    model, optimizer = start(Perturbing, torch.bfloat16)
    assert optimizer.present()[0] is model.weight
    assert type(optimizer).present(optimizer)[0] is model.weight
    assert optimizer.groups() is optimizer.param_groups
    assert optimizer.count() == 1


class OwnList(Optimizer):
    """Steps over the list that it made when it was made."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.own:
            p.sub_(p.grad.to(p.dtype), alpha=self.lr)


class OwnStates(OwnList):
    """With something in its state for each of them."""

    def step(self, closure: Any = None) -> None:
        for p in self.own:
            self.state[p]["steps"] = self.state[p]["steps"] + 1
        super().step()


class OwnData(Optimizer):
    """Through ``.data``, which changes no version."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.own:
            p.data.sub_(p.grad.to(p.dtype), alpha=self.lr)


class GroupsData(OwnData):
    """As optimizers of 2018 wrote, to what is in the groups."""

    def step(self, closure: Any = None) -> None:
        self.own = self.present()
        super().step()


class EverySecond(Optimizer):
    """Steps at every second call."""

    calls, every = 0, 2

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for p in self.present() if self.calls % self.every == 0 else []:
            p.sub_(p.grad, alpha=self.lr)


class Accumulating(EverySecond):
    """Has a window of its own."""

    every = 16


@in_both_halves
@pytest.mark.parametrize("lr", [0.5, 1e-4, 1e-6])
def test_a_step_over_a_list_of_the_optimizer_s_own_is_refused(lr: float, half: torch.dtype) -> None:
    model, optimizer = start(lambda params: OwnList(params, lr), half)
    backward(model, optimizer)
    with pytest.raises(UsageError, match=r"OwnList\.step wrote to a 16-bit weight.*self\.param_groups, or train at O1"):
        optimizer.step()
    assert torch.equal(model.weight, truth(model).to(half))
    assert optimizer.param_groups[0]["params"][0] is model.weight


@in_both_halves
def test_state_that_is_looked_up_by_a_weight_of_an_own_list_is_refused_in_words(half: torch.dtype) -> None:
    model, optimizer = with_optimizer(nn.Linear(8, 8, bias=False), OwnStates)
    optimizer.state[model.weight]["steps"] = 0
    amp.initialize(model, optimizer, opt_level="O2", dtype=half, loss_scale=1.0, verbosity=0)
    backward(model, optimizer)
    before = truth(model)
    with pytest.raises(UsageError, match=r"looked up the state.*self\.param_groups"):
        optimizer.step()
    assert torch.equal(truth(model), before)
    assert optimizer.state[model.weight] == {"steps": 0}


@in_both_halves
@pytest.mark.parametrize(
    ("make", "lr", "said"),  # after how many steps
    [
        (OwnData, 1e-1, 4),
        (OwnData, 1e-6, 61),
        (GroupsData, 1e-6, None),
        (EverySecond, 1e-6, None),
        (Accumulating, 1e-6, None),
        (torch.optim.SGD, 1e-6, None),
    ],
    ids=["own list", "own list, small updates", "groups", "every second", "every 16th", "SGD"],
)
def test_steps_that_change_no_master_are_told_of_once(
    make: Any, lr: float, said: int | None, half: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = start(lambda params: make(params, lr=lr), half)
    with caplog.at_level(logging.WARNING, "halfstep"):
        for i in range(1, 65):
            backward(model, optimizer)
            optimizer.step()
            assert bool(caplog.records) is (said is not None and i >= said), i
    assert [record.message for record in caplog.records] == [
        f"No step of {make.__name__} has changed an fp32 master so far, although there were gradients. If it updates "
        "weights from its own list or copy, let it iterate over self.param_groups, which hold the masters during a "
        "step. If its learning rate is still 0, or it is still accumulating gradients, ignore this warning."
    ] * (said is not None)


@in_both_halves
def test_steps_without_gradients_are_not_told_of(half: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    _, optimizer = start(EverySecond, half)
    optimizer.calls = 1
    with caplog.at_level(logging.WARNING, "halfstep"):
        for optimizer.calls in (0, 2, 4, 6, 8):
            optimizer.step()
    assert not caplog.records


class OneBlock(Optimizer):
    """Steps one parameter and leaves the others as they are, as block-coordinate optimizers do for a while."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        first = self.param_groups[0]["params"][0]
        first.sub_(first.grad, alpha=1e-2)


def test_a_step_that_leaves_out_some_weights_is_not_told_of(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = start_amp(nn.Linear(8, 8), OneBlock, "O2", dtype=torch.bfloat16, loss_scale=1.0)
    with caplog.at_level(logging.WARNING, "halfstep"):
        for _ in range(8):
            backward(model, optimizer)
            optimizer.step()
    assert not caplog.records


def test_only_the_first_steps_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = start(EverySecond, torch.bfloat16)
    for _ in range(10):
        backward(model, optimizer)
        optimizer.step()
    monkeypatch.setattr("halfstep.parameters.outside_writes.Snapshot", pytest.fail)
    for _ in range(4):
        backward(model, optimizer)
        optimizer.step()
    assert optimizer.calls == 14
