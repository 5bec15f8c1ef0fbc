"""A training step on CUDA asks the device for no value: on a fake CUDA tensor, which has none, it would raise.

Gradients are written by hand, since a fake device has no backward pass. What waits for a real device is
``test_steps_on_cuda``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from halfstep import amp, optimizers, scaling
from halfstep.torch_internals.torch_compat import tensor_hooks
from tests.support.device_work import fake_steps
from tests.support.fake_cuda import READS_THE_HOST
from tests.support.worlds import start_amp, step_and_clear

# Fused optimizers compare addresses of weights on the host, which no device has to tell.
pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")


@pytest.fixture(autouse=True, params=["eager", "triton"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A fake CUDA device, and a backend; of the Triton kernels only the launches are there."""
    with fake_steps(monkeypatch, request.param):
        yield


FUSED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "FusedAdam": lambda p: optimizers.FusedAdam(p, weight_decay=0.1),
    "FusedSGD": lambda p: optimizers.FusedSGD(p, lr=0.1, momentum=0.9),
    "FusedLAMB": lambda p: optimizers.FusedLAMB(p, max_grad_norm=1.0),
    "FusedMixedPrecisionLamb": lambda p: optimizers.FusedMixedPrecisionLamb(p),
    "FusedNovoGrad": lambda p: optimizers.FusedNovoGrad(p),
    "FusedAdagrad": lambda p: optimizers.FusedAdagrad(p),
    "torch.AdamW(fused)": lambda p: torch.optim.AdamW(p, fused=True),
}
"""Optimizers that leave a step out on the device; torch's fused SGD and Adagrad do not run on fakes (as of 2.13)."""


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 2), nn.LayerNorm(2))


def backward(model: nn.Module) -> None:
    """What a backward pass would bring."""
    for param in model.parameters():
        grad = torch.ones_like(param)
        param.grad = grad if param.grad is None else param.grad + grad


def assert_has_stepped(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """A fake weight has no value to compare; but the state of every weight is made by a step."""
    assert set(optimizer.state) == set(model.parameters())


def loss() -> torch.Tensor:
    return torch.ones(())


def steps_of_scale_loss(level: str, scale: Any, make: Callable[[Any], torch.optim.Optimizer], **options: Any) -> None:
    model, optimizer = start_amp(network(), make, level, loss_scale=scale, **options)
    for _ in range(2):
        for _ in range(2):  # the second is added to what the first brought
            with amp.scale_loss(loss(), optimizer):
                backward(model)
        step_and_clear(optimizer)
    assert_has_stepped(optimizer, model)


@pytest.mark.parametrize(("level", "scale"), [("O0", "dynamic"), ("O1", "dynamic"), ("O2", "dynamic"), ("O2", 128.0)])
@pytest.mark.parametrize("optimizer", FUSED)
def test_scale_loss(optimizer: str, level: str, scale: Any) -> None:
    steps_of_scale_loss(level, scale, FUSED[optimizer])


@pytest.mark.parametrize("clip", [False, True])
def test_larc(clip: bool) -> None:
    model = network()
    optimizer = optimizers.LARC(optimizers.FusedSGD(model.parameters(), lr=0.1, momentum=0.9), clip=clip)
    backward(model)
    optimizer.step()
    assert_has_stepped(optimizer, model)


@pytest.mark.parametrize("found", [0.0, 1.0])
@pytest.mark.parametrize("rule", [scaling.DynamicLossScale(), scaling.StaticLossScale(8.0)], ids=["dynamic", "static"])
def test_a_loss_scale_moves(rule: Any, found: float) -> None:
    state = scaling.LossScaleState(torch.ones(()), *torch.zeros(2, dtype=torch.int32).unbind())
    after = rule.update(state, torch.full((), found))
    assert {t.device.type for t in after} == {"cuda"}


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("optimizer", FUSED)
def test_grad_scaler(optimizer: str, clip: bool) -> None:
    model = network()
    optim, scaler = FUSED[optimizer](model.parameters()), amp.GradScaler()
    for _ in range(2):
        scaler.scale(loss())
        backward(model)
        if clip:
            scaler.clip_grad_norm_(optim, 1.0)
        scaler.step(optim)
        scaler.update()
        optim.zero_grad()
    assert_has_stepped(optim, model)


@pytest.mark.costly
@pytest.mark.exhaustive
@pytest.mark.parametrize("scale", ["dynamic", 128.0])
@pytest.mark.parametrize("optimizer", [name for name in FUSED if name.startswith("Fused")])
def test_gradient_release(optimizer: str, scale: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfstep.optimizers.release._BUCKET", 1)
    model = network()
    optim: Any = FUSED[optimizer](model.parameters())
    model, optim = amp.initialize(model, optim, opt_level="O2", loss_scale=scale, verbosity=0)
    optim.options = replace(optim.options, max_grad_norm=None)  # LAMB clips by default
    optim.attach(model)
    for _ in range(2):
        with amp.scale_loss(loss(), optim):
            backward(model)
            for param, hook in [(p, hook) for p in model.parameters() for hook in tensor_hooks(p)]:
                hook(param)
        assert all(param.grad is None for param in model.parameters())
        optim.step()
    assert_has_stepped(optim, model)


@pytest.mark.parametrize("scale", ["dynamic", 128.0])
def test_an_optimizer_that_cannot_skip_on_the_device_reads_one_flag(scale: Any) -> None:
    """So it is documented: the step of any other optimizer is called or not, and the host must know which."""
    with pytest.raises(READS_THE_HOST):
        steps_of_scale_loss("O1", scale, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    amp.deactivate()
    steps_of_scale_loss("O1", 1.0, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
