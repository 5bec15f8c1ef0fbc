"""A pass belongs to the parameters that it reaches, also to parameters of optimizers that its block does not name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from halfstep import amp, optimizers
from halfstep.core.errors import UsageError
from tests.support.worlds import scaled_backward

SCALE = 1024.0
X = torch.linspace(-1.0, 1.0, 8).reshape(2, 4)

LEVELS = pytest.mark.parametrize(
    ("level", "dtype"), [("O0", "bfloat16"), ("O1", "float16"), ("O2", "float16"), ("O2", "bfloat16")]
)


def pair(level: str, dtype: str, *, scale: Any = SCALE, fused: bool = True) -> tuple[Any, Any, Any, Any]:
    """A trunk and a head, each with an optimizer."""
    torch.manual_seed(0)
    models: Any = [nn.Linear(4, 4), nn.Linear(4, 1)]
    opts: Any = [torch.optim.SGD(model.parameters(), lr=0.125) for model in models]
    models, opts = amp.initialize(
        models, opts, opt_level=level, dtype=dtype, loss_scale=scale, fused=fused, verbosity=0
    )
    return *models, *opts


def trunk_loss(trunk: nn.Module) -> torch.Tensor:
    return trunk(X).float().square().sum()


def joint_loss(trunk: nn.Module, head: nn.Module) -> torch.Tensor:
    return head(trunk(X)).float().square().sum()


def grads(*modules: nn.Module) -> list[torch.Tensor]:
    return [p.grad.float().clone() for module in modules for p in module.parameters() if p.grad is not None]


@LEVELS
@pytest.mark.parametrize("named", ["head", "trunk", "both"])
@pytest.mark.parametrize("before", [False, True], ids=["first pass", "after a pass"])
def test_what_a_pass_brings_is_unscaled_once_wherever_it_comes(
    level: str, dtype: str, named: str, before: bool
) -> None:
    trunk, head, of_trunk, of_head = pair(level, dtype)
    one, two, of_one, of_two = pair(level, dtype, scale=1.0)  # the same without a scale
    if before:
        scaled_backward(trunk_loss(trunk), of_trunk)
        scaled_backward(trunk_loss(one), [of_one, of_two])
    scaled_backward(joint_loss(trunk, head), {"head": of_head, "trunk": of_trunk, "both": [of_trunk, of_head]}[named])
    scaled_backward(joint_loss(one, two), [of_one, of_two])
    expected = grads(one, two)
    assert len(expected) == 4
    torch.testing.assert_close([*grads(trunk, head)], [*expected], rtol=2.0**-7, atol=2.0**-7)
    for optimizer in (of_trunk, of_head):
        optimizer.step()
    assert [amp.steps_skipped(optimizer) for optimizer in (of_trunk, of_head)] == [0, 0]


def test_a_pass_that_does_not_reach_an_optimizer_leaves_its_gradients_alone() -> None:
    trunk, head, of_trunk, of_head = pair("O2", "float16")
    scaled_backward(trunk_loss(trunk), of_trunk)
    before = [(p.grad, p.grad._version) for p in trunk.parameters()]
    scaled_backward(head(X).float().sum(), of_head)
    assert [(p.grad, p.grad._version) for p in trunk.parameters()] == before


@pytest.mark.parametrize("cleared", [True, False])
def test_an_overflow_skips_the_step_of_the_optimizer_that_has_it_until_it_is_cleared(cleared: bool) -> None:
    trunk, head, of_trunk, of_head = pair("O2", "float16", scale="dynamic")
    (weight, _) = trunk.parameters()
    weight.register_hook(lambda grad: grad * float("inf"))
    scaled_backward(joint_loss(trunk, head), of_head)
    of_head.step()
    assert amp.steps_skipped(of_head) == 0, "its own gradients are finite"
    if cleared:
        of_trunk.zero_grad()
        weight.grad = torch.zeros_like(weight, dtype=torch.float32)
    of_trunk.step()
    assert amp.steps_skipped(of_trunk) == (not cleared)
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 2.0**16, "only named optimizers move the scale"


def test_a_failed_pass_puts_back_the_gradients_of_every_optimizer() -> None:
    trunk, head, of_trunk, of_head = pair("O2", "float16")
    scaled_backward(joint_loss(trunk, head), of_trunk)
    before = grads(trunk, head)
    trunk.weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        scaled_backward(joint_loss(trunk, head), of_head)
    assert all(map(torch.equal, grads(trunk, head), before))


def test_a_pass_that_reaches_a_released_optimizer_must_name_it() -> None:
    models: Any = [nn.Linear(4, 4), nn.Linear(4, 1)]
    opts: Any = [optimizers.FusedSGD(model.parameters(), lr=0.125) for model in models]
    (trunk, head), (of_trunk, of_head) = amp.initialize(
        models, opts, opt_level="O2", dtype="float16", loss_scale=SCALE, verbosity=0
    )
    of_trunk.attach(trunk)
    before = trunk.weight.detach().clone()
    with pytest.raises(UsageError, match=r"Name all optimizers: amp.scale_loss\(loss, \[first, second\]\)"):
        scaled_backward(joint_loss(trunk, head), of_head)
    assert torch.equal(trunk.weight, before)
    scaled_backward(joint_loss(trunk, head), [of_trunk, of_head])
    assert not torch.equal(trunk.weight, before)


def test_a_block_does_not_touch_the_optimizers_of_other_threads() -> None:
    _, head, _, of_head = pair("O2", "float16")

    def elsewhere(then: Callable[[], None]) -> list[torch.Tensor]:
        trunk, *_ = pair("O2", "float16", scale=1.0)
        trunk_loss(trunk).backward()
        then()
        return grads(trunk)

    found: list[list[torch.Tensor]] = []
    inside, done = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        assert done.wait(60)

    thread = threading.Thread(target=lambda: found.append(elsewhere(wait)))
    with amp.scale_loss(head(X).float().sum(), of_head) as scaled:
        thread.start()
        assert inside.wait(60)
        scaled.backward()
    done.set()
    thread.join()
    assert all(map(torch.equal, found[0], elsewhere(lambda: None)))


def test_blocks_of_two_optimizers_may_be_nested() -> None:
    trunk, head, of_trunk, of_head = pair("O2", "float16")
    with amp.scale_loss(trunk_loss(trunk), of_trunk) as outer:
        scaled_backward(head(X).float().square().sum(), of_head)
        outer.backward()
    found = grads(trunk, head)
    for optimizer in (of_trunk, of_head):
        optimizer.zero_grad()
    scaled_backward(trunk_loss(trunk), of_trunk)
    scaled_backward(head(X).float().square().sum(), of_head)
    assert all(map(torch.equal, found, grads(trunk, head)))
