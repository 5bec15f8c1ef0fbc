"""Apex's ``parallel`` on real processes over gloo."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from halfstep import amp
from halfstep.core.errors import ArgumentValueError
from halfstep.parallel import (
    DistributedDataParallel,
    Reducer,
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
)
from tests.support.processes import Ranks, ranks_of
from tests.support.worlds import scaled_backward, step_and_clear

# ---- DistributedDataParallel


def switched(rank: int) -> tuple[list[float], list[float]]:
    """The gradients of a pass without an all-reduce, and those after one with it."""
    parallel = DistributedDataParallel(nn.Linear(3, 1))
    grads = []
    for switch in (parallel.disable_allreduce, parallel.enable_allreduce):
        switch()
        parallel(torch.full((1, 3), 1.0 + rank)).sum().backward()
        grads.append(parallel.module.weight.grad.flatten().tolist())
    return grads[0], grads[1]


def test_allreduce_is_switched_off_and_on(ranks: Ranks) -> None:
    assert ranks.run(switched) == [([1.0] * 3, [3.0] * 3), ([2.0] * 3, [3.0] * 3)]


def meaningless(rank: int) -> str:
    import warnings

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            DistributedDataParallel(nn.Linear(1, 1), retain_allreduce_buffers=True, num_allreduce_streams=2)
    (warning,) = told
    return str(warning.message)


def test_arguments_without_meaning_are_told_of_once(ranks: Ranks) -> None:
    (first, _) = ranks.run(meaningless)
    assert "retain_allreduce_buffers, num_allreduce_streams have no meaning" in first


def reduced(rank: int, of_module: bool) -> list[float]:
    torch.manual_seed(rank)
    model = nn.Linear(2, 1).bfloat16()
    model.weight.grad = torch.full_like(model.weight, 1.0 + rank)
    reducer = Reducer(model if of_module else [model.weight.grad])
    reducer.reduce()
    return [*model.weight.grad.flatten().tolist(), *(model.weight.flatten().tolist() if of_module else [])]


@pytest.mark.parametrize("of_module", [True, False])
def test_reducer(ranks: Ranks, of_module: bool) -> None:
    first, second = ranks.run(reduced, of_module)
    assert first == second
    assert first[:2] == [1.5, 1.5]


# ---- SyncBatchNorm

SIZES = [2, 5, 1, 3]  # every rank has another batch


def batch(rank: int, dims: int, dtype: torch.dtype) -> torch.Tensor:
    shape = (SIZES[rank], 3, *[4] * dims)
    return (torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64) * 2 + rank).to(dtype)


def normalize(module: nn.Module, x: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    y = module(x)
    (y.double() * weights).sum().backward()
    assert y.dtype is x.dtype
    return [y.detach(), x.grad, module.weight.grad, module.bias.grad, module.running_mean, module.running_var]


def synced(rank: int, dims: int, dtype: torch.dtype, channel_last: bool, group_size: int) -> list[torch.Tensor]:
    module = SyncBatchNorm(3, process_group=create_syncbn_process_group(group_size), channel_last=channel_last).to(
        torch.float64 if dtype is torch.float64 else torch.float32
    )
    with torch.no_grad():
        module.weight.copy_(torch.tensor([1.0, 2.0, 3.0]))
    x = batch(rank, dims, dtype)
    last = channel_last and dims > 0
    found = normalize(
        module, x.movedim(1, -1) if last else x, (lambda w: w.movedim(1, -1) if last else w)(weights_of(x))
    )
    return [t.movedim(-1, 1) if last and t.dim() > 1 else t for t in found]


def weights_of(x: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-1, 1, x.numel(), dtype=torch.float64).view_as(x)


@pytest.mark.exhaustive
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("channel_last", [False, True])
@pytest.mark.parametrize("dims", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group_size", [0, 2])
def test_statistics_of_unequal_batches_are_exact(
    world: int, dims: int, dtype: torch.dtype, channel_last: bool, group_size: int
) -> None:
    results = ranks_of(world).run(synced, dims, dtype, channel_last, group_size)
    size = group_size or world
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.1}[dtype]
    for first in range(0, world, size):
        members = range(first, first + size)
        batches = [batch(rank, dims, dtype).double() for rank in members]
        whole: Any = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d)[dims](3).double()
        with torch.no_grad():
            whole.weight.copy_(torch.tensor([1.0, 2.0, 3.0]))
        y, x_grad, w_grad, b_grad, mean, var = normalize(
            whole, torch.cat(batches), torch.cat([weights_of(b) for b in batches])
        )
        mine = [results[rank] for rank in members]
        assert_near(torch.cat([r[0] for r in mine]), y, tolerance)
        assert_near(torch.cat([r[1] for r in mine]), x_grad, tolerance)
        # The gradients of weight and bias are each rank's own; DistributedDataParallel averages them.
        assert_near(sum(r[2].double() for r in mine), w_grad, tolerance * 10)
        assert_near(sum(r[3].double() for r in mine), b_grad, tolerance * 10)
        for r in mine:
            assert_near(r[4], mean, tolerance)
            assert_near(r[5], var, tolerance)


def assert_near(found: Any, expected: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


def normalized_under_ddp(rank: int, torchs: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = convert_syncbn_model(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)))
    ddp: Any = nn.parallel.DistributedDataParallel(model) if torchs else DistributedDataParallel(model)
    ddp(batch(rank, 2, torch.float32)).square().sum().backward()
    return [model[1].running_mean.clone(), model[0].weight.grad.clone()]


@pytest.mark.parametrize("torchs", [True, False])
def test_wrappers_take_it_on_a_cpu(ranks: Ranks, torchs: bool) -> None:
    for ours, others in zip(*ranks.run(normalized_under_ddp, torchs), strict=True):
        assert torch.equal(ours, others)
        assert ours.abs().sum() > 0


def test_alone_and_in_evaluation_it_is_a_batchnorm() -> None:
    own, ours = nn.BatchNorm1d(3), SyncBatchNorm(3)
    x = batch(1, 1, torch.float32)
    for training in (True, False):
        own.train(training)
        ours.train(training)
        torch.testing.assert_close(ours(x), own(x), atol=1e-5, rtol=1e-5)
    z = torch.ones_like(x)
    fused = SyncBatchNorm(3, fuse_relu=True).eval()
    assert torch.equal(fused(x, z), torch.relu(SyncBatchNorm(3).eval()(x) + z))
    with pytest.raises(ArgumentValueError, match="more than one value"):
        SyncBatchNorm(3)(torch.ones(1, 3))


# ---- multiproc


@pytest.mark.exhaustive
def test_multiproc_runs_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, sys\n"
        "pathlib.Path(sys.argv[1], os.environ['RANK'] + '-of-' + os.environ['WORLD_SIZE']).touch()\n"
    )
    command = [sys.executable, "-m", "halfstep.parallel.multiproc", str(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "torchrun" in done.stderr
    assert sorted(p.name for p in tmp_path.glob("*-of-*"))[:2] == ["0-of-2", "1-of-2"] or torch.cuda.is_available()


def wrapped_for_a_while(rank: int, level: str, scoped: bool) -> list[Any]:
    """Two steps in a wrapper, two without it, and two in a new one; passes are not synchronized."""
    scope = amp.auto_cast(scoped, dtype=torch.float16)
    model: Any = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, dtype=torch.bfloat16, verbosity=0)
    dtypes, masters = [], []
    if scoped:  # autocast of torch refuses to wrap weights of the other half (torch 2.13)
        with scope, pytest.raises(RuntimeError, match="Unexpected floating ScalarType"):
            torch.nn.parallel.DistributedDataParallel(model)
    for round_ in range(3):
        called = model if round_ == 1 else torch.nn.parallel.DistributedDataParallel(model)
        for step in range(2):
            x = torch.full((2, 3), 0.5 + step + (rank if called is not model else 0))
            with scope, contextlib.nullcontext() if called is model else called.no_sync():
                called(x).float().square().mean().backward()
                dtypes.append(model[0].weight.grad.dtype)
                optimizer.zero_grad()
                scaled_backward(called(x).float().square().mean(), optimizer)
            step_and_clear(optimizer)
        del called
        masters.append([p.detach().clone() for p in amp.master_params(optimizer)])
    amp.deactivate()
    return [dtypes, masters]


@pytest.mark.parametrize(("level", "scoped"), [("O0", False), ("O2", False), ("O2", True)])
def test_when_a_wrapper_is_gone_its_parameters_are_ordinary_ones(ranks: Ranks, level: str, scoped: bool) -> None:
    (dtypes, masters), (_, others) = ranks.run(wrapped_for_a_while, level, scoped)
    assert {*dtypes[:2], *dtypes[3:]} == {torch.float32}, "without a wrapper from the next zero_grad on"
    torch.testing.assert_close(masters, others, rtol=0, atol=0)
