"""A monitor on ranks: under DDP and FSDP2, on all ranks or on one, and what their rows add up to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from halfstep import optimizers
from halfstep.numerics import Monitor, Row, merge_rows
from tests.support.processes import Ranks
from tests.support.shards import mesh
from tests.support.worlds import advance, start_amp, unscaled_step


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))  # of the last layer one rank has nothing


def data(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def under_ddp(rank: int, watching: list[int]) -> tuple[list[Row], list[torch.Tensor]]:
    model, optimizer = start_amp(net(), torch.optim.AdamW, "O2", dtype=torch.float16, lr=1e-2)
    wrapper = nn.parallel.DistributedDataParallel(model)
    monitor = Monitor(wrapper, optimizer, every=2)
    if rank in watching:
        monitor.attach()
    for step in range(3):
        advance(wrapper(data(rank, step)).float().square().mean(), optimizer)
    monitor.detach()
    return monitor.rows(), [p.detach() for p in model.parameters()]


def under_fsdp(rank: int, watching: list[int], clip: float | None) -> tuple[list[Row], list[torch.Tensor]]:
    from torch.distributed.fsdp import fully_shard

    model: Any = net()
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh())
    optimizer = optimizers.FusedAdam(model.parameters(), lr=1e-2, max_grad_norm=clip)
    monitor = Monitor(model, optimizer, every=2)
    if rank in watching:
        monitor.attach()
    for step in range(3):
        unscaled_step(model(data(rank, step)).square().mean(), optimizer)
    monitor.detach()
    return monitor.rows(), [p.full_tensor().detach() for p in model.parameters()]


def grads(rows: list[Row]) -> dict[str, Row]:
    return {row.module: row for row in rows if row.tensor == "grad" and row.step == 0}


@pytest.mark.parametrize("watching", [[0, 1], [1]], ids=["both ranks", "one rank"])
def test_ddp(ranks: Ranks, watching: list[int]) -> None:
    (first, weights), (second, _) = ranks.run(under_ddp, watching)
    (_, plain), _ = ranks.run(under_ddp, [])
    assert all(torch.equal(a, b) for a, b in zip(weights, plain, strict=True))
    assert {row.step for row in second} == {0, 2}
    assert {row.module for row in second if row.tensor == "output"} == {"0", "1", "2", "(root)"}
    if len(watching) == 2:
        assert {name: row.amax for name, row in grads(first).items()} == {
            name: row.amax for name, row in grads(second).items()
        }, "gradients are averaged"
        both = merge_rows([*first, *second])
        (output,) = [row for row in both if (row.step, row.module, row.tensor) == (0, "0", "output")]
        assert output.numel == 2 * 4 * 7


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("watching", [[0, 1], [1]], ids=["both ranks", "one rank"])
def test_gradients_of_shards(ranks: Ranks, watching: list[int], clip: float | None) -> None:
    (first, weights), (second, _) = ranks.run(under_fsdp, watching, clip)
    (_, plain), _ = ranks.run(under_fsdp, [], clip)
    assert all(torch.equal(a, b) for a, b in zip(weights, plain, strict=True))
    assert grads(second)
    if len(watching) == 2:
        model = net()
        (model(data(0, 0)).square().mean() + model(data(1, 0)).square().mean()).div(2).backward()
        found = grads(merge_rows([*first, *second]))
        for name, p in model.named_parameters():
            assert p.grad is not None
            assert found[name].numel == p.numel()
            assert found[name].amax == pytest.approx(float(p.grad.abs().max()), rel=1e-5)
            assert found[name].rms == pytest.approx(float(p.grad.square().mean().sqrt()), rel=1e-5)
