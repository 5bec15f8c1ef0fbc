"""Training under ``amp.initialize``: any optimizer, any parameters, any pattern of backward passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from halfstep import amp
from tests.support.apex_recording import batch, net
from tests.support.worlds import LEVELS, assert_equal, scaled_backward, start_amp, step_and_clear

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-4),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-4),
}


def start(
    level: str,
    half: torch.dtype = torch.bfloat16,
    make: str | Callable[[Any], torch.optim.Optimizer] = "SGD momentum",
    model: nn.Module | None = None,
    **options: Any,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net() if model is None else model
    make = OPTIMIZERS[make] if isinstance(make, str) else make
    return start_amp(model, make, level, dtype=half, **{"loss_scale": 128.0, **options})


def loss_of(model: nn.Module, t: int) -> torch.Tensor:
    x, y, _ = batch(t)
    return F.cross_entropy(model(x), y)


def train(model: nn.Module, optim: Any, steps: int) -> None:
    for t in range(steps):
        scaled_backward(loss_of(model, t), optim)
        step_and_clear(optim)


# ---- which parameters


@pytest.mark.parametrize("level", LEVELS)
def test_param_groups_and_add_param_group(level: str) -> None:
    model, extra = net(), nn.Linear(3, 3)

    def make(_: Any) -> torch.optim.Optimizer:
        groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": [*model[1].parameters()]}]
        return torch.optim.SGD(groups, lr=1.0)

    model, optim = start(level, make=make, model=model)
    optim.add_param_group({"params": model[3].weight, "lr": 0.2})
    optim.add_param_group({"params": [model[3].bias]})
    extra = amp.initialize(extra, opt_level=level, verbosity=0)
    optim.add_param_group({"params": extra.parameters(), "lr": 0.3})
    assert [g["lr"] for g in optim.param_groups] == [0.5, 1.0, 0.2, 1.0, 0.3]
    half = {torch.float16, torch.bfloat16}
    in_optimizer = {p.dtype for p in amp.master_params(optim)}
    assert in_optimizer & half == (half & {torch.bfloat16} if level == "O3" else set())
    before = [p.detach().clone() for p in [*model.parameters(), *extra.parameters()]]
    x, y, _ = batch(0)
    scaled_backward(F.cross_entropy(extra(model(x)), y), optim)
    optim.step()
    for old, new in zip(before, [*model.parameters(), *extra.parameters()], strict=True):
        assert not torch.equal(old, new)
    with pytest.raises(TypeError, match="set"):
        optim.add_param_group({"params": {nn.Parameter(torch.ones(1))}})


class Mixed(nn.Module):
    """Holds an fp64 parameter, an integer one and integer buffers beside a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.offset = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.table = nn.Parameter(torch.arange(3), requires_grad=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) + self.offset.to(x.dtype))[:, self.table]


@pytest.mark.parametrize("level", LEVELS)
def test_fp64_and_integer_parameters(level: str) -> None:
    model, optim = start(level, make="Adam", model=Mixed())
    assert model.table.dtype is torch.int64
    assert model.steps.dtype is torch.int64
    before = model.offset.detach().clone()
    train(model, optim, 2)
    assert not torch.equal(before, model.offset)
    # left alone: fp64 parameters train in fp64
    model, optim = start("O2", make="Adam", model=Mixed(), cast_model_type=False)
    train(model, optim, 2)
    assert model.offset.dtype is torch.float64


# ---- which passes


@pytest.mark.parametrize(("level", "expected"), [("O1", 8e-8), ("O2", 8e-8), ("O3", 0.0)])
def test_gradients_below_the_smallest_float16_number_add_up_in_fp32(level: str, expected: float) -> None:
    """Without masters (O3) each pass leaves float16 numbers, and 2e-8 is none."""
    model, optim = start(level, torch.float16, "SGD", nn.Linear(1, 1, bias=False), loss_scale=65536.0)
    for _ in range(4):
        scaled_backward((model(torch.ones(1, 1)).float() * 2e-8).sum(), optim)
    (master,) = amp.master_params(optim)
    assert float(master.grad) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("level", LEVELS)
def test_the_scale_may_change_between_delayed_passes(level: str) -> None:
    """Apex unscaled all of them by the last scale."""
    model, optim = start(level, torch.float16, "SGD", loss_scale="dynamic", max_loss_scale=256.0)
    reference, plain = start(level, torch.float16, "SGD", loss_scale=1.0)
    for scale, t in ((256.0, 0), (64.0, 1), (16.0, 2)):
        amp.load_state_dict({"loss_scaler0": {"loss_scale": scale, "unskipped": 0}}, optimizer=optim)
        scaled_backward(loss_of(model, t), optim, delay_unscale=t < 2)
        scaled_backward(loss_of(reference, t), plain)
    for ours, theirs in zip(amp.master_params(optim), amp.master_params(plain), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0.01, atol=1e-3)


@pytest.mark.parametrize("level", LEVELS)
def test_the_block_after_a_delayed_pass_shows_the_gradients_of_both(level: str) -> None:
    """Some scripts average the gradients of a window by hand in its last block."""
    model, optim = start(level, torch.float16, "SGD", loss_scale=128.0)
    plain, reference = start(level, torch.float16, "SGD", loss_scale=1.0)
    scaled_backward(loss_of(model, 0), optim, delay_unscale=True)
    with amp.scale_loss(loss_of(model, 1), optim) as scaled_loss:
        scaled_loss.backward()
        for p in model.parameters():
            p.grad.mul_(0.5)
    for t in range(2):
        scaled_backward(0.5 * loss_of(plain, t), reference)
    for ours, theirs in zip(amp.master_params(optim), amp.master_params(reference), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0.01, atol=1e-3)


def fail_after(loss: torch.Tensor, optim: Any) -> None:
    with amp.scale_loss(loss, optim) as scaled:
        scaled.backward()
        raise ZeroDivisionError


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("delayed", [None, False, True])
def test_a_pass_that_fails_leaves_no_gradient(level: str, delayed: bool | None) -> None:
    """``delayed``: whether the pass before it was, None if there was none."""
    model, optim = start(level, loss_scale=128.0)
    twin, reference = start(level, loss_scale=128.0)
    if delayed is not None:
        scaled_backward(loss_of(model, 0), optim, delay_unscale=delayed)
        scaled_backward(loss_of(twin, 0), reference)
    with pytest.raises(ZeroDivisionError):
        fail_after(loss_of(model, 1), optim)
    scaled_backward(loss_of(model, 2), optim)
    scaled_backward(loss_of(twin, 2), reference)
    if delayed:  # its gradients cannot be told from those of the failed pass
        before = [p.detach().clone() for p in model.parameters()]
        optim.step()
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert amp.steps_skipped(optim) == 1
        return
    assert_equal([a.grad for a in amp.master_params(optim)], [b.grad for b in amp.master_params(reference)])


@pytest.mark.parametrize("level", LEVELS)
def test_plain_backward_counts(level: str) -> None:
    model, optim = start(level, make="SGD")
    twin, reference = start(level, make="SGD", loss_scale=1.0)
    loss_of(model, 0).backward()
    scaled_backward(loss_of(twin, 0), reference)
    optim.step()
    reference.step()
    torch.testing.assert_close([*model.parameters()], [*twin.parameters()])
    before = model[0].weight.detach().clone()
    model.zero_grad()
    optim.step()
    assert torch.equal(before, model[0].weight), "what the model has cleared was used"
