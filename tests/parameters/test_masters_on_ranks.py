"""``amp.master_params`` where ranks share the optimizer's state or the weights."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from halfstep import amp, optimizers
from tests.support.processes import Ranks
from tests.support.worlds import BF16, scaled_backward

FINE = 1.0 + 2.0**-20  # rounds to 1 in 16 bits


def clipped(rank: int, zero: bool) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of torch.jit
        from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    params = model.parameters()
    optimizer = ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.0) if zero else torch.optim.SGD(params, lr=0.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", dtype=BF16, loss_scale=4.0, verbosity=0)
    parallel = DistributedDataParallel(model)
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(rank))
    scaled_backward(parallel(x).float().square().sum(), optimizer)
    norm = float(clip_grad_norm_(amp.master_params(optimizer), 0.25))
    found = [p.grad.float().clone() for p in model.parameters()]
    for master in amp.master_params(optimizer):
        if master.dtype is torch.float32:
            with torch.no_grad():
                master.view(-1)[:] = FINE
    optimizer.step()
    dtypes = [master.dtype for master in amp.master_params(optimizer)]
    values = [(p.detach().clone(), model.state_dict()[name]) for name, p in model.named_parameters()]
    amp.deactivate()
    return norm, found, dtypes, values


def test_a_zero_redundancy_optimizer_yields_the_masters_that_this_rank_steps(ranks: Ranks) -> None:
    (expected, grads, _, _), _ = ranks.run(clipped, False)
    answers = ranks.run(clipped, True)
    for norm, found, _, values in answers:
        assert norm == pytest.approx(expected, rel=1e-5)
        torch.testing.assert_close(found, grads)
        assert all(torch.equal(weight, torch.ones_like(weight)) for weight, _ in values)
    owned = [[dtype is torch.float32 for dtype in dtypes] for _, _, dtypes, _ in answers]
    assert [sum(owners) for owners in zip(*owned, strict=True)] == [1] * 4, "each master is on one rank"
    for rank, (_, _, _, values) in enumerate(answers):
        for mine, (_, saved) in zip(owned[rank], values, strict=True):
            assert torch.equal(saved, torch.full_like(saved, FINE if mine else 1.0))


def sharded(rank: int, fused: bool) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model: Any = fully_shard(nn.Linear(4, 8).bfloat16(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    make: Any = optimizers.FusedSGD if fused else torch.optim.RMSprop
    optimizer = amp.give_masters(make(model.parameters(), lr=0.0), fused=fused)
    model(torch.ones(2, 4, dtype=BF16)).float().sum().backward()
    masters = list(amp.master_params(optimizer))
    norm = clip_grad_norm_(masters, 0.5).full_tensor()  # type: ignore[attr-defined]
    left = sum(float(p.grad.full_tensor().float().square().sum()) for p in model.parameters()) ** 0.5
    with torch.no_grad():
        masters[0].fill_(FINE)
    optimizer.step()
    kept: Any = next(iter(amp.master_params(optimizer)))
    with torch.no_grad():
        model.weight.fill_(3.0)
    written: Any = next(iter(amp.master_params(optimizer)))
    rounded = written.full_tensor().to(BF16)  # a split master keeps its remainder
    amp.deactivate()
    return float(norm), left, kept.dtype, kept is masters[0], rounded.tolist() == [[3.0] * 4] * 8


@pytest.mark.parametrize("fused", [True, False])
def test_masters_of_sharded_weights(ranks: Ranks, fused: bool) -> None:
    for norm, left, dtype, same, followed in ranks.run(sharded, fused):
        assert norm > 0.5
        assert left == pytest.approx(0.5, rel=0.02)
        assert dtype is torch.float32
        assert same
        assert followed
