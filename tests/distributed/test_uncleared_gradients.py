"""Gradients that a step skipped for one rank's overflow has left are dropped on every rank."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import halfstep
from halfstep import amp
from tests.distributed.test_fsdp import OPTIMIZERS, data, loss_of, sharded, whole
from tests.support.processes import Ranks

STEPS, OVERFLOWS = 5, 2


def train(rank: int, level: str, fused: bool, unsynced: str, always: bool) -> list[Any]:
    """Skips and weights of windows of two passes, where the first pass of one window overflows on rank 1."""
    torch.manual_seed(0)
    model: Any = nn.Linear(4, 2)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
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
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
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
        with amp.scale_loss(loss_of(model, data(rank, i)) * factor, made) as scaled_loss:
            scaled_loss.backward()
        made.step()
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
