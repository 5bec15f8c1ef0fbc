"""What holds whichever way a program trains: one table of doors for each rule, against float64 training."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from halfstep import HalfstepError, StaticLossScale, amp
from halfstep.core.errors import LossScaleCollapsed
from tests.support.doors import DYNAMIC, open_door
from tests.support.worlds import BF16, FP16, FP32, FP64, Made, assert_equal, in_both_halves, step_and_clear

LEVELS = ["O0", "O1", "O2", "O2, fused=False", "O3"]
DOORS = [*LEVELS, "handle", "wrap_optimizer", "FP16_Optimizer", "GradScaler", "GradScaler, attached"]
RETRIES = [name for name in DOORS if name not in ("handle", "wrap_optimizer")]  # the handle skips, as Apex's did
every_door = pytest.mark.parametrize("name", DOORS)

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-4),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-4),
    "Adam foreach": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-4, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-4, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, eps=1e-4),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.002, eps=1e-3),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01, eps=1e-4),
}
LEAST_DB: dict[tuple[bool, Any], int] = {  # signal to noise of the change of the weights; True for SGD
    (True, FP32): 100,
    (True, FP16): 45,
    (True, BF16): 28,
    (False, FP32): 75,
    (False, FP16): 16,
    (False, BF16): 12,  # dividing by roots magnifies rounding
}


def net(dtype: torch.dtype = FP32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).to(dtype)


def opened(name: str, optimizer: str = "SGD", half: torch.dtype = FP16) -> Any:
    return open_door(name, OPTIMIZERS[optimizer], half, net(half if name == "FP16_Optimizer" else FP32))


def exact_loss(model: nn.Module, i: int) -> torch.Tensor:
    """The loss of a door, of a model in float64."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(i))
    return model(x.double()).square().mean()


def flat(tensors: Any) -> torch.Tensor:
    return torch.cat([t.detach().double().flatten() for t in tensors])


def masters(door: Any) -> torch.Tensor:
    """The numbers that the optimizer updates, in one tensor."""
    return flat(amp.master_params(door.optimizer))


@functools.cache
def exact_training(optimizer: str, passes: int) -> torch.Tensor:
    """Where plain PyTorch gets without the step that overflows."""
    model = net(FP64)
    plain = OPTIMIZERS[optimizer](model.parameters())
    for step in (0, 1, 2, 4, 5, 6, 7):
        for i in range(passes):
            exact_loss(model, 2 * step + i).backward()
        step_and_clear(plain)
    return flat(model.parameters())


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@in_both_halves
@every_door
def test_a_training_goes_where_fp32_goes(name: str, half: torch.dtype, optimizer: str, passes: int) -> None:
    """Gradients of several passes add up, each unscaled once, and a step that overflows is as if it never was."""
    if name == "O3" and not optimizer.startswith("SGD"):
        optimizer = "SGD"  # at O3 squares of gradients are float16, where they are zeros
    expected = exact_training(optimizer, passes)
    door = opened(name, optimizer, half)
    start = masters(door)
    for step in range(8):
        for i in range(passes):
            door.backward(door.loss(2 * step + i, math.inf if step == 3 else 1.0))
        door.step()
        door.optimizer.zero_grad()
    computed_in = FP32 if name == "O0" or name.startswith("GradScaler") else half
    decibel = 20 * math.log10((expected - start).norm() / (masters(door) - expected).norm())
    assert decibel > LEAST_DB[optimizer.startswith("SGD"), computed_in]


FAILING = [(name, DYNAMIC) for name in [*LEVELS, "handle"]]
FAILING += [(name, StaticLossScale(1.0)) for name in ("O2", "O2, fused=False")]  # elsewhere it adds up in place


@pytest.mark.parametrize("where", ["in the backward pass", "after it, in the block"])
@pytest.mark.parametrize(("name", "rule"), FAILING)
def test_a_pass_that_fails_leaves_gradients_and_scale(name: str, where: str, rule: Any) -> None:
    """Apex lost what was there before."""
    door = open_door(name, OPTIMIZERS["SGD"], rule=rule)
    door.backward(door.loss(0))
    before = [p.grad.clone() for p in amp.master_params(door.optimizer)]
    loss = door.loss(1)
    if where == "in the backward pass":
        loss.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        door.backward(loss, lambda: 1 / 0)
    assert_equal([p.grad for p in amp.master_params(door.optimizer)], before)
    assert door.scale() == rule.init_scale
    door.backward(door.loss(2))
    door.step()
    assert not door.skipped()


SCALERS = [f"GradScaler{words}" for words in ("", ", attached", ", unscale_", ", attached, unscale_")]
CLIPPING = [(name, norm) for name in DOORS if name not in SCALERS for norm in (2.0, 1.0, math.inf)]


@pytest.mark.parametrize(("name", "norm_type"), [*CLIPPING, *((name, 2.0) for name in SCALERS)])
def test_clipping_is_of_unscaled_gradients_and_an_overflow_skips(name: str, norm_type: float) -> None:
    model = net(FP64)
    exact_loss(model, 0).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type)
    door = opened(name)
    door.backward(door.loss(0))
    torch.testing.assert_close(door.clip(0.01, norm_type).double(), norm, rtol=0.01, atol=0)
    clipped = torch.linalg.vector_norm(flat(p.grad for p in amp.master_params(door.optimizer)), norm_type)
    assert clipped.item() == pytest.approx(0.01, rel=0.01)
    door.step()
    door.optimizer.zero_grad()
    before = masters(door)
    door.backward(door.loss(1, math.inf))
    told = float(door.clip(0.01, norm_type))
    assert told == -1 or not math.isfinite(told)
    door.step()
    assert door.skipped()
    assert torch.equal(masters(door), before)


def make_lbfgs(params: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params, lr=0.1, max_iter=3)


CLOSURES = pytest.mark.parametrize("make", [OPTIMIZERS["SGD"], make_lbfgs], ids=["SGD", "LBFGS"])


def run_closure(door: Any, overflows: float) -> tuple[Any, list[float]]:
    """Run a step whose closure overflows some times; return what it returned and the scale of each run."""
    scales = []

    def closure() -> torch.Tensor:
        door.optimizer.zero_grad()
        scales.append(door.scale())
        loss = door.loss(0, math.inf if len(scales) <= overflows else 1.0)
        door.backward(loss)
        return loss.detach()

    return door.run(closure), scales


@pytest.mark.parametrize("overflows", [0, 2])
@CLOSURES
@pytest.mark.parametrize("name", RETRIES)
def test_a_closure_that_overflows_is_run_again_at_a_lower_scale(name: str, make: Any, overflows: int) -> None:
    door = open_door(name, make, model=net(FP16 if name == "FP16_Optimizer" else FP32))
    before = door.loss(0).item()
    returned, scales = run_closure(door, overflows)
    assert scales[: overflows + 1] == [DYNAMIC.init_scale / 2**i for i in range(overflows + 1)]
    assert returned.item() == pytest.approx(before)
    assert door.loss(0).item() < before


@CLOSURES
@pytest.mark.parametrize("name", RETRIES)
def test_a_closure_that_never_is_finite_moves_nothing(name: str, make: Any) -> None:
    door = open_door(name, make, model=net(FP16 if name == "FP16_Optimizer" else FP32))
    before = masters(door)
    with pytest.raises(HalfstepError, match=r"not finite at any scale|the loss scale is not the cause|overflowed"):
        run_closure(door, math.inf)
    assert torch.equal(masters(door), before)


@every_door
def test_a_collapse_names_the_parameter(name: str) -> None:
    door = opened(name)

    def train() -> None:
        for _ in range(200):
            door.train(functools.partial(door.loss, 0, math.nan))

    with pytest.raises(LossScaleCollapsed, match=r"parameter 0 of group 0 of SGD|0\.weight"):
        train()
    assert door.scale() > 0


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32, FP64], ids=str)
@every_door
def test_a_loss_of_any_dtype_is_scaled_without_an_overflow(name: str, dtype: torch.dtype) -> None:
    """The scale times 1,000 is above the largest number of float16."""
    door = opened(name)
    before = masters(door)
    door.train(lambda: door.loss(0).to(dtype) + 1000)
    assert not door.skipped()
    assert not torch.equal(masters(door), before)


@in_both_halves
@every_door
def test_sparse_gradients_add_up_and_skip(name: str, half: torch.dtype) -> None:
    def lookup(dtype: torch.dtype = FP32) -> nn.Module:
        table = nn.Embedding.from_pretrained(torch.arange(15.0).reshape(5, 3) / 16, freeze=False, sparse=True)
        return Made(lambda self, index: self.table(index).pow(2).sum(-1), table=table).to(dtype)

    plain = lookup()
    reference = OPTIMIZERS["SGD"](plain.parameters())
    door = open_door(name, OPTIMIZERS["SGD"], half, lookup(half if name == "FP16_Optimizer" else FP32))
    index = torch.tensor([1, 3, 1])
    for factor in (1.0, 1.0, math.inf):
        for _ in range(2):
            door.backward(door.model(index).float().mean() * factor)
            plain(index).mean().backward()
        assert next(iter(amp.master_params(door.optimizer))).grad.is_sparse
        door.step()
        door.optimizer.zero_grad()
        if factor == 1.0:
            reference.step()
        reference.zero_grad()
    assert door.skipped()
    torch.testing.assert_close(masters(door), flat(plain.parameters()), rtol=0.02, atol=0.01)


@every_door
def test_a_scheduler_follows_the_steps_that_were_taken(name: str) -> None:
    """No warning says that it came before the optimizer, also where the first step is skipped."""
    door = opened(name)
    scheduler = torch.optim.lr_scheduler.StepLR(door.optimizer, 1, 0.5)
    for factor in (math.inf, 1.0, math.inf, 1.0):
        door.train(functools.partial(door.loss, 0, factor))
        if not door.skipped():
            scheduler.step()
    assert door.optimizer.param_groups[0]["lr"] == 0.025
