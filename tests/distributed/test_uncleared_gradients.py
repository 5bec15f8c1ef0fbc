"""How gradients are cleared changes nothing. Those that a step skipped for one rank's overflow has left are dropped."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import halfstep
from halfstep import amp
from tests.distributed.test_fsdp import OPTIMIZERS, data, loss_of, sharded, whole
from tests.support.processes import Ranks
from tests.support.worlds import assert_equal, scaled_backward, scaled_step, with_optimizer

STEPS, OVERFLOWS = 5, 2


def train(rank: int, level: str, fused: bool, unsynced: str, always: bool) -> list[Any]:
    """Skips and weights of windows of two passes, where the first pass of one window overflows on rank 1."""
    torch.manual_seed(0)
    model, optimizer = with_optimizer(nn.Linear(4, 2), torch.optim.SGD, lr=0.1, momentum=0.9, fused=fused)
    rule = halfstep.DynamicLossScale(init_scale=256.0)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, dtype=torch.float16, loss_scale=rule, verbosity=0
    )
    wrapped = DistributedDataParallel(model)
    skips = []
    for i in range(STEPS):
        for turn in range(2):
            factor = torch.inf if (i, turn, rank) == (OVERFLOWS, 0, 1) else 1.0
            with wrapped.no_sync() if turn in map(int, unsynced) else nullcontext():
                loss = wrapped(torch.full((2, 4), 0.1 * (rank + i + turn))).float().square().mean() * factor
                scaled_backward(loss, optimizer)
        optimizer.step()
        skips.append(bool(optimizer.step_was_skipped))
        if always or not skips[-1]:
            model.zero_grad()
    amp.deactivate()
    return [skips, *(p.detach().tolist() for p in model.parameters())]


@pytest.mark.parametrize("unsynced", ["", "0", "01"], ids=["synced", "first unsynced", "all unsynced"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_clearing_only_after_a_step_that_was_taken_is_clearing_always(
    ranks: Ranks, level: str, fused: bool, unsynced: str
) -> None:
    always, if_taken = (ranks.run(train, level, fused, unsynced, each) for each in (True, False))
    assert always[0] == always[1] == if_taken[0] == if_taken[1]
    assert always[0][0] == [i == OVERFLOWS for i in range(STEPS)]
    assert torch.tensor(always[0][1]).isfinite().all()


def train_shards(rank: int, optimizer: str, always: bool) -> list[Any]:
    """The same of shards of FSDP2, one pass a window."""
    model = sharded()
    made: Any = OPTIMIZERS[optimizer](model.parameters())
    model, made = amp.initialize(model, made, opt_level="O1", dtype=torch.float16, loss_scale=256.0, verbosity=0)
    skips = []
    for i in range(STEPS):
        factor = torch.inf if (i, rank) == (OVERFLOWS, 1) else 1.0
        scaled_step(loss_of(model, data(rank, i)) * factor, made)
        skips.append(bool(made.step_was_skipped))
        if always or not skips[-1]:
            model.zero_grad()
    amp.deactivate()
    return [skips, *(p.tolist() for p in whole(model.parameters()))]


@pytest.mark.parametrize("optimizer", ["adamw", "FusedAdam"])
def test_shards_too(ranks: Ranks, optimizer: str) -> None:
    always, if_taken = (ranks.run(train_shards, optimizer, each) for each in (True, False))
    assert always[0] == always[1] == if_taken[0] == if_taken[1]
    assert always[0][0] == [i == OVERFLOWS for i in range(STEPS)]


class WithNorm(nn.Module):
    """A model whose RMSNorm computes gradients in fp32 at O2."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(nn.functional.rms_norm(self.first(x), (8,), self.weight))
        return found


WAYS: dict[str, Any] = {  # to clear gradients
    "optimizer": lambda _, optimizer: optimizer.zero_grad(),
    "wrapper": lambda wrapped, _: wrapped.zero_grad(),
    "model": lambda wrapped, _: getattr(wrapped, "module", wrapped).zero_grad(),
    "zeros": lambda wrapped, _: wrapped.zero_grad(set_to_none=False),
    "p.grad": lambda wrapped, _: [setattr(p, "grad", None) for p in wrapped.parameters()],
    "foreach": lambda wrapped, _: torch._foreach_zero_(
        [p.grad for p in wrapped.parameters() if p.grad is not None] or [torch.zeros(())]
    ),
}
DOORS = ["block", "block unsynced", "plain", "clipped", "clipped by hand", "GradScaler", "plain, twice", "mixed"]
WRAPPERS = ["DistributedDataParallel", "views", "FSDP2", "none"]
# Between forward and backward a module of FSDP2 has unsharded parameters: only the optimizer clears those of shards.
PLACES = [(wrapper, early) for wrapper in WRAPPERS for early in (False, True) if not (early and wrapper == "FSDP2")]


def train_through(rank: int, door: str, wrapper: str, early: bool, ways: list[str]) -> list[list[torch.Tensor]]:
    """The masters after three windows through one door, for each way to clear gradients."""
    results = []
    for clear in map(WAYS.__getitem__, ways):
        torch.manual_seed(0)
        model: Any = WithNorm()
        if wrapper == "FSDP2":
            fully_shard(model)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2", dtype="bfloat16", verbosity=0)
        wrapped = model
        if wrapper in ("DistributedDataParallel", "views"):
            wrapped = DistributedDataParallel(model, gradient_as_bucket_view=wrapper == "views")
        scaler = amp.GradScaler(init_scale=128.0, enabled=door == "GradScaler")
        for i in range(3):
            passes = 2 if door in ("plain, twice", "mixed") else 1
            for turn in range(passes):
                with wrapped.no_sync() if door == "block unsynced" and wrapped is not model else nullcontext():
                    loss = wrapped(torch.full((2, 4), 0.1 * (rank + i + turn + 1))).float().square().mean()
                    if early and turn == 0:  # as many scripts do: between the forward and the backward pass
                        clear(wrapped, optimizer)
                    if "block" in door or (door == "mixed" and turn == 0):
                        scaled_backward(loss, optimizer)
                    else:
                        scaler.scale(loss).backward()
            if door == "clipped":
                optimizer.clip_master_grads(0.05)
            elif door == "clipped by hand":
                nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.05)
            scaler.step(optimizer)
            scaler.update()
            if not early:
                clear(wrapped, optimizer)
        amp.deactivate()
        masters = [p.detach() for p in amp.master_params(optimizer)]
        results.append(whole(masters) if wrapper == "FSDP2" else masters)
    return results


@pytest.mark.parametrize(("wrapper", "early"), PLACES)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("way", [way for way in WAYS if way != "optimizer"])
def test_every_way_to_clear_gradients_gives_the_same_weights(
    ranks: Ranks, wrapper: str, door: str, early: bool, way: str
) -> None:
    (expected, first), (_, second) = ranks.run(train_through, door, wrapper, early, ["optimizer", way])
    assert_equal(first, expected)
    if wrapper != "none":
        assert_equal(second, expected)
