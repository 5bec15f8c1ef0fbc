"""A rank that leaves out parameters which others use gets torch's error, and sends nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from halfstep import amp
from tests.support.processes import RankFailed, Ranks
from tests.support.worlds import scaled_backward, with_optimizer


def train(rank: int, level: str, door: str, frozen: bool) -> None:
    model, optimizer = with_optimizer(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.optim.SGD, lr=0.1)
    scale = 128.0 if door == "scaled block" else 1.0
    options = {"dtype": "bfloat16", "loss_scale": scale, "verbosity": 0}
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, **options)
    wrapped = DistributedDataParallel(model)
    scaler = amp.GradScaler(init_scale=128.0, enabled=door == "GradScaler")
    for step in range(3):
        if rank == 0 and step == 1:
            if frozen:
                model[1].requires_grad_(False)
            else:
                model[1].forward = lambda x: x
        loss = wrapped(torch.ones(2, 4)).float().square().mean()
        if "block" in door:
            scaled_backward(loss, optimizer)
        else:
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("level", "door", "frozen"),
    [("O2", "block", False), ("O2", "scaled block", True), ("O2", "GradScaler", False), ("O1", "GradScaler", True)],
)
def test_a_part_left_out_on_one_rank_is_an_error_of_torch(ranks: Ranks, level: str, door: str, frozen: bool) -> None:
    with pytest.raises(RankFailed, match=r"rank 0: [\s\S]*Expected to have finished reduction in the prior iteration"):
        ranks.run(train, level, door, frozen)
