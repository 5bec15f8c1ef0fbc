"""Parameters that come to an optimizer while it trains, with gradients of passes that they were outside of.

A pass multiplies those gradients by the loss scale as well, and nothing divides them. With SGD at a rate of 1 the
update is the gradient that was stepped with.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from halfstep import amp
from tests.support.worlds import scaled_backward

KINDS = [("O0", True), ("O1", True), ("O2", True), ("O2", False), ("O3", True)]
at_each_level = pytest.mark.parametrize(("level", "fused"), KINDS, ids=["O0", "O1", "O2", "O2-plain", "O3"])
DROPPED = "1 parameter had gradients when added to this SGD, and these were dropped"


class Training:
    """A linear layer without bias, "body", before the "head" that the optimizer has."""

    def __init__(self, level: str, fused: bool = True, **options: Any) -> None:
        torch.manual_seed(0)
        self.body, head = nn.Linear(8, 8, bias=False), nn.Linear(8, 2)
        optimizer = torch.optim.SGD(head.parameters(), lr=1.0)
        options = {"dtype": torch.float16, "loss_scale": 1024.0, "verbosity": 0, "fused": fused} | options
        model = nn.Sequential(self.body, head)
        self.model, self.optimizer = amp.initialize(model, optimizer, opt_level=level, **options)

    def loss(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(torch.linspace(-1, 1, 32).view(4, 8)).float().square().mean()
        return loss

    def backward(self, **options: Any) -> None:
        scaled_backward(self.loss(), self.optimizer, **options)

    def add(self) -> None:
        self.optimizer.add_param_group({"params": [self.body.weight]})

    def extend(self) -> None:
        self.optimizer.param_groups[0]["params"].append(self.body.weight)

    def moved(self, work: Callable[[], Any]) -> torch.Tensor:
        """By how much the body moves in some work."""
        before = self.model.state_dict()["0.weight"].clone()
        work()
        return self.model.state_dict()["0.weight"].float() - before

    def step(self) -> None:
        self.backward()
        self.optimizer.step()


@at_each_level
@pytest.mark.parametrize("door", ["add", "extend"])
def test_a_gradient_of_passes_that_the_parameter_was_outside_of_is_dropped(level: str, fused: bool, door: str) -> None:
    training, cleared = Training(level, fused), Training(level, fused)
    for each in (training, cleared):
        each.backward()
        each.optimizer.zero_grad()
    cleared.body.weight.grad = None
    cleared.add()
    if door == "add":
        with pytest.warns(UserWarning, match=DROPPED):
            training.add()
        assert training.body.weight.grad is None
        moved = training.moved(training.step)
    else:
        training.extend()
        with pytest.warns(UserWarning, match=DROPPED):
            moved = training.moved(training.step)
    expected = cleared.moved(cleared.step)
    assert torch.equal(training.body.weight.grad, cleared.body.weight.grad)  # type: ignore[arg-type]
    torch.testing.assert_close(moved, expected, rtol=0.0, atol=1e-3)
    assert expected.abs().max() > 0.05


@at_each_level
def test_a_parameter_that_comes_between_pass_and_step_does_not_move(level: str, fused: bool) -> None:
    training = Training(level, fused)
    training.backward()
    training.extend()
    with pytest.warns(UserWarning, match=DROPPED):
        moved = training.moved(training.optimizer.step)
    assert moved.norm() == 0


@at_each_level
def test_a_parameter_that_comes_in_an_open_block_has_its_gradient_unscaled(level: str, fused: bool) -> None:
    training, named = Training(level, fused), Training(level, fused)
    named.add()
    named.backward()
    with amp.scale_loss(training.loss(), training.optimizer) as scaled_loss:
        training.add()
        scaled_loss.backward()
    assert torch.equal(training.body.weight.grad, named.body.weight.grad)  # type: ignore[arg-type]


@at_each_level
def test_its_gradient_is_not_in_the_norm_by_which_others_are_clipped(level: str, fused: bool) -> None:
    training, without = Training(level, fused), Training(level, fused)
    for each in (training, without):
        each.backward()
    training.extend()
    with pytest.warns(UserWarning, match=DROPPED):
        norm = training.optimizer.clip_master_grads(1.0)
    assert torch.equal(norm, without.optimizer.clip_master_grads(1.0))


@at_each_level
def test_it_is_dropped_when_the_list_of_a_group_is_replaced_by_one_of_the_same_length(level: str, fused: bool) -> None:
    training = Training(level, fused)
    training.backward()
    group = training.optimizer.param_groups[0]
    group["params"] = [training.body.weight, group["params"][1]]
    with pytest.warns(UserWarning, match=DROPPED):
        training.backward()
    assert training.body.weight.grad is not None
    assert training.body.weight.grad.norm() < 10


@at_each_level
def test_a_grad_scaler_divides_all_gradients_that_are_there(level: str, fused: bool) -> None:
    training = Training(level, fused, loss_scale=1.0)
    scaler = amp.GradScaler(init_scale=256.0)
    for _ in range(3):
        scaler.scale(training.loss()).backward()
    training.add()
    grad = training.body.weight.grad
    assert grad is not None
    total = grad.float() / 256
    moved = training.moved(lambda: scaler.step(training.optimizer))
    torch.testing.assert_close(moved, -total, rtol=0.0, atol=1e-3)
    assert total.abs().max() > 0.15


@at_each_level
@pytest.mark.parametrize("why", ["no pass was scaled", "a scale of 1.0", "no gradient", "it was there before"])
def test_nothing_is_dropped_where_no_gradient_was_scaled(level: str, fused: bool, why: str) -> None:
    training = Training(level, fused, loss_scale=1.0 if why == "a scale of 1.0" else 1024.0)
    weight = training.body.weight
    if why == "it was there before":
        training.add()
    if why == "no gradient":
        weight.requires_grad_(False)
    if why != "no pass was scaled":
        training.backward()
        training.backward()
    else:
        weight.grad = torch.ones_like(weight)
    before = 0.0 if weight.grad is None else weight.grad.float().clone()
    weight.requires_grad_(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if why == "it was there before":
            training.optimizer.param_groups.reverse()
        else:
            training.add()
        training.backward()
    (added,) = torch.autograd.grad(training.loss(), weight)
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad.float() - before, added.float(), rtol=0.0, atol=1e-3)
