"""``LARC`` handed to ``amp.initialize`` and ``amp.scale_loss``, as SwAV does it, at every level."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from halfstep.apex.optimizers import FusedSGD
from halfstep.apex.parallel.LARC import LARC
from torch import nn
from torch.nn import functional as F

from halfstep.apex import amp
from tests.support.worlds import scaled_backward, scaled_step

LEVELS = {"O0": 1e-5, "O1": 0.02, "O2": 0.02, "O3": 0.03}
"""How far, of the length of the way that the weights go, they may be from those in float64."""


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).to(dtype)


def batch(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(i)
    return torch.randn(32, 6, generator=generator), torch.randint(3, (32,), generator=generator)


def rate(i: int) -> float:
    return 0.5 * (i + 1) / 8  # a script sets it in the groups, before each step


def in_float64(steps: int, *, clip: bool) -> list[torch.Tensor]:
    """LARC (arXiv 1708.03888) around SGD with momentum, by hand."""
    model = net(torch.float64)
    params = list(model.parameters())
    momenta = [torch.zeros_like(p) for p in params]
    for i in range(steps):
        x, y = batch(i)
        grads = torch.autograd.grad(F.cross_entropy(model(x.double()), y), params)
        with torch.no_grad():
            for p, g, m in zip(params, grads, momenta, strict=True):
                local = 0.02 * p.norm() / (g.norm() + 1e-3 * p.norm() + 1e-8)
                if clip:
                    local = (local / rate(i)).clamp(max=1.0)
                m.mul_(0.9).add_((g + 1e-3 * p) * local)
                p.sub_(m * rate(i))
    return [p.detach() for p in params]


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.SGD, FusedSGD])
@pytest.mark.parametrize("level", LEVELS)
def test_training(level: str, kind: Any, clip: bool) -> None:
    model: Any = net()
    start = [p.detach().double().clone() for p in model.parameters()]
    optimizer: Any = LARC(kind(model.parameters(), lr=0.5, momentum=0.9, weight_decay=1e-3), 0.02, clip)
    model, same = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert same is optimizer
    for i in range(8):
        x, y = batch(i)
        for group in optimizer.param_groups:
            group["lr"] = rate(i)
        optimizer.zero_grad()
        scaled_step(F.cross_entropy(model(x), y), optimizer)
        assert [group["weight_decay"] for group in optimizer.param_groups] == [1e-3]
    masters = list(amp.master_params(optimizer))
    assert {p.dtype for p in masters} == {torch.float16 if level == "O3" else torch.float32}
    for master, first, exact in zip(masters, start, in_float64(8, clip=clip), strict=True):
        way = (exact - first).norm()
        assert (master.detach().double() - exact).norm() < LEVELS[level] * way


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_skips_the_step(level: str) -> None:
    model: Any = net()
    optimizer: Any = LARC(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=1e-3))
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    x, y = batch(0)
    before = [p.detach().clone() for p in amp.master_params(optimizer)]
    scaled_backward(F.cross_entropy(model(x), y) * float("inf"), [optimizer])
    optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(amp.master_params(optimizer), before, strict=True))
    assert bool(optimizer.step_was_skipped)
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 2.0**15
    assert [group["weight_decay"] for group in optimizer.param_groups] == [1e-3]
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    scaled_step(F.cross_entropy(model(x), y), optimizer)
    assert not any(torch.equal(p, b) for p, b in zip(amp.master_params(optimizer), before, strict=True))
