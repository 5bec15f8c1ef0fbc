"""``Iteration``: which gradients of an iteration are unscaled already, for a parameter in two optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from halfstep import amp
from halfstep.amp.iteration import Iteration


def params() -> list[Any]:
    made = [torch.zeros(2, requires_grad=True) for _ in range(2)]
    for p in made:
        p.grad = torch.ones(2)
    return made


def replace(p: torch.Tensor) -> None:
    p.grad = torch.ones(2)


def add(p: torch.Tensor) -> None:
    p.grad.add_(1.0)


CASES: dict[tuple[int, Callable[[torch.Tensor], object]], bool] = {
    # losses since it was noted, what happened to the gradient -> unscaled still
    (0, id): True,
    (0, add): True,  # clipped, say
    (0, replace): False,
    (1, id): True,  # the other loss brought nothing to it
    (1, add): False,
    (1, replace): False,
}


@pytest.mark.parametrize(("losses", "change"), CASES)
def test_a_gradient_is_unscaled_until_something_is_added(losses: int, change: Callable[[torch.Tensor], object]) -> None:
    p, other = params()
    once = Iteration(unscaled={id(p): (p.grad, None)})
    for _ in range(losses):
        once.fix_versions()
    change(p)
    assert once.among([other, p]) == ({id(p)} if CASES[losses, change] else set())


def test_a_parameter_without_a_gradient_is_not_unscaled() -> None:
    p, q = params()
    once = Iteration(unscaled={id(p): (p.grad, None), id(q): (q.grad, None)})
    assert once.among([p, q]) == {id(p), id(q)}
    q.grad = None
    assert once.among([p, q]) == {id(p)}


def test_what_another_optimizer_unscales_between_a_loss_and_its_pass_is_no_longer_unscaled_after_the_pass() -> None:
    shared = nn.Parameter(torch.zeros(1))
    first, second, third = (torch.optim.SGD([shared], lr=0.0) for _ in range(3))
    scaler = amp.GradScaler(init_loss_scaling=128.0)
    scaler.scale(shared.sum()).backward()
    scaler.unscale_(first)
    shared.grad.zero_()  # type: ignore[union-attr]
    scaled = scaler.scale(shared.sum())
    scaler.unscale_(second)
    scaled.backward()
    scaler.unscale_(third)
    assert shared.grad.item() == 1.0  # type: ignore[union-attr]


@pytest.mark.parametrize("first_with_two", [0, 1])
def test_a_loss_between_two_optimizers_does_not_touch_what_they_share(first_with_two: int) -> None:
    shared, own = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    first, second = torch.optim.SGD([shared], lr=0.0), torch.optim.SGD([shared, own], lr=0.0)
    scaler = amp.GradScaler(init_loss_scaling=128.0)
    for iteration in range(4):
        scaler.scale(shared.sum()).backward()
        scaler.unscale_(first)
        scaler.clip_grad_norm_(first, 0.5)  # after `unscale_` it only clips
        if iteration >= first_with_two:
            scaler.scale(own.sum()).backward()
            scaler.unscale_(second)
            assert (shared.grad.item(), own.grad.item()) == pytest.approx((0.5, 1.0))
        shared.grad = own.grad = None
        scaler.update()
