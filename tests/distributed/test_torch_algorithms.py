"""Algorithms of ``torch.distributed`` beside amp: model averaging, ZeRO, communication hooks."""

from __future__ import annotations

import copy
import importlib
import logging
import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from halfstep import amp
from halfstep.core.errors import UsageError
from tests.distributed.test_sharded_levels import OPTIMIZERS, assert_near, loss_of, net
from tests.support.processes import Ranks
from tests.support.shards import whole
from tests.support.worlds import BF16, FP16, advance, scaled_backward, with_optimizer

ONE = torch.tensor(1.0)


def started(model: Any, optimizer: Any, dtype: torch.dtype, level: str = "O2", fp16: float = 128.0) -> tuple[Any, Any]:
    scale = None if dtype is BF16 else fp16
    return amp.initialize(model, optimizer, opt_level=level, dtype=dtype, loss_scale=scale, verbosity=0)


def inputs(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def of_distributed(name: str) -> Any:
    """A class of ``torch.distributed.optim``, whose import warns of torch's own scripting."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(importlib.import_module("torch.distributed.optim"), name)


# ---- local SGD: ranks train alone, and average their models now and then


def local_sgd(rank: int, ways: list[str], name: str, dtype: torch.dtype) -> dict[str, list[torch.Tensor]]:
    """The masters at the end, by who averages them at the second and at the fourth step."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    PostLocalSGDOptimizer = of_distributed("PostLocalSGDOptimizer")
    found = {}
    for way in ways:
        model: Any = net()
        averager = PeriodicModelAverager(period=2, warmup_steps=1)
        optimizer: Any = OPTIMIZERS[name](model.parameters())
        if way == "a wrapper that amp knows":
            optimizer = PostLocalSGDOptimizer(optimizer, averager)
        model, optimizer = started(model, optimizer, dtype)
        stepped = PostLocalSGDOptimizer(optimizer, averager) if way == "a wrapper of amp's" else optimizer
        for i in range(4):
            scaled_backward(loss_of(model(inputs(i, rank)), ONE), optimizer)
            stepped.step()
            if way == "weights":
                averager.average_parameters(model.parameters())
            elif way == "masters":
                averager.average_parameters(amp.master_params(optimizer))
            elif way == "by hand" and i % 2:
                for master in amp.master_params(optimizer):
                    part = master.detach() / 2
                    dist.all_reduce(part)
                    with torch.no_grad():
                        master.copy_(part)
            stepped.zero_grad()
        found[way] = [whole(p) for p in amp.master_params(optimizer)]
        amp.deactivate()
    return found


@pytest.mark.parametrize(("name", "dtype"), [("AdamW", BF16), ("AdamW", FP16), ("RMSprop", BF16)])
def test_model_averaging_averages_masters_where_it_is_given_them(ranks: Ranks, name: str, dtype: torch.dtype) -> None:
    right = ["by hand", "masters", "a wrapper that amp knows"]
    rounded = ["weights", "a wrapper of amp's"]
    first, second = ranks.run(local_sgd, right + rounded, name, dtype)
    for way in right:
        assert_near(first[way], second[way], 0.0)
        # A wrapper keeps torch's own step: its sums are rounded in other places than those of the fused one.
        assert_near(first[way], first["by hand"], 1e-7)
    for way in rounded:  # what docs/distributed.md warns of: 16-bit weights are averaged, and masters keep their rest
        assert any(not torch.equal(a, b) for a, b in zip(first[way], second[way], strict=True))


# ---- ZeRO


def zero(rank: int, saved: dict[str, Any] | None) -> tuple[dict[str, Any], list[torch.Tensor]]:
    model, optimizer = with_optimizer(net(), of_distributed("ZeroRedundancyOptimizer"), torch.optim.AdamW, lr=0.01)
    model, optimizer = started(model, optimizer, BF16)
    parallel = nn.parallel.DistributedDataParallel(model)
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    kept = saved or {}
    for i in range(0 if saved is None else 2, 4):
        if i == 2 and saved is None:
            optimizer.consolidate_state_dict(to=0)
            optimizer_state = [optimizer.state_dict() if rank == 0 else None]
            dist.broadcast_object_list(optimizer_state, src=0)
            kept = copy.deepcopy({"model": dict(model.state_dict()), "optimizer": optimizer_state[0]})
        advance(loss_of(parallel(inputs(i, rank)), ONE), optimizer)
    masters = [whole(p) for p in model.state_dict().values()]
    amp.deactivate()
    return kept, masters


def zero_resumed(rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    kept, expected = zero(rank, None)
    return expected, zero(rank, kept)[1]


def test_zero_resumes(ranks: Ranks) -> None:
    for expected, found in ranks.run(zero_resumed):
        assert_near(found, expected, 0.0)


# ---- communication hooks: the table of docs/distributed.md

FACES = ["none", "none, GradScaler", "none, a plain backward pass"]
HOOKS = [*FACES, "allreduce", "fp16_compress", "fp16_compress_wrapper", "powerSGD", "post_localSGD", "noop"]


def register(hook: str, wrapper: Any) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, post_localSGD_hook
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    if hook == "powerSGD":
        state = power.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        wrapper.register_comm_hook(state, power.powerSGD_hook)
    elif hook == "post_localSGD":
        alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
        local = post_localSGD_hook.PostLocalSGDState(process_group=None, subgroup=alone, start_localSGD_iter=2)
        wrapper.register_comm_hook(local, post_localSGD_hook.post_localSGD_hook)
    elif hook == "fp16_compress_wrapper":
        wrapper.register_comm_hook(None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook))
    elif hook not in FACES:
        module = debugging_hooks if hook == "noop" else default_hooks
        wrapper.register_comm_hook(None, getattr(module, f"{hook}_hook"))


def hooked(rank: int, level: str, dtype: torch.dtype) -> tuple[dict[str, list[float]], dict[str, torch.Tensor]]:
    """For each hook the relative errors of the gradients of five steps, which hardly move the weights; and the third.

    With a loss scale, the loss of rank 1 is infinite in the fourth step.
    """
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    found: dict[str, list[float]] = {}
    third = {}
    for hook in HOOKS:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4))
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-30)
        model, optimizer = started(model, optimizer, dtype, level, 1.0 if hook in FACES[1:] else 128.0)
        wrapper = nn.parallel.DistributedDataParallel(model)
        register(hook, wrapper)
        errors = found[hook] = []
        scaler: Any = amp.GradScaler(init_scale=128.0, enabled=hook == FACES[1])
        for i in range(5):
            grads = [torch.autograd.grad(loss_of(model(inputs(i, r)), ONE), list(model.parameters())) for r in (0, 1)]
            mean = sum(torch.cat([grad.float().flatten() for grad in each]) for each in grads) / 2
            weight = torch.tensor(float("inf") if (i, rank, dtype) == (3, 1, FP16) and hook != FACES[2] else 1.0)
            loss = loss_of(wrapper(inputs(i, rank)), weight)
            if hook in FACES[1:]:
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
            else:
                scaled_backward(loss, optimizer)
            got = torch.cat([p.grad.float().flatten() for p in model.parameters()])
            errors.append(((got - mean).norm() / mean.norm()).item())
            third[hook] = got if i == 2 else third.get(hook, got)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        amp.deactivate()
    return found, third


@pytest.mark.parametrize(("level", "dtype", "sent"), [("O1", FP16, 0.0), ("O2", FP16, 2**-11), ("O2", BF16, 2**-8)])
def test_what_communication_hooks_do_to_gradients(ranks: Ranks, level: str, dtype: torch.dtype, sent: float) -> None:
    """``sent``: half a unit in the last place of what is sent where a hook of somebody else is registered."""
    (found, first), (_, second) = ranks.run(hooked, level, dtype)
    for hook, errors in found.items():
        compressed = max(sent, 2**-11) if "fp16" in hook else sent
        assert errors[0] <= (1e-7 if hook in FACES else compressed + 1e-7) or hook == "noop", hook
        assert (errors[0] > 1e-5) == (hook == "noop" or (hook not in FACES and compressed > 0)), hook
        if hook in ("powerSGD", "post_localSGD", "noop"):  # of the third step on, or from the first
            assert 0.1 < errors[2] < 1.0, hook
        else:
            assert errors[2] < max(compressed, 1e-7), hook
        # powerSGD adds to each gradient what it left out of the one before, also inf.
        assert math.isnan(errors[4]) == (hook == "powerSGD" and dtype is FP16), hook
        assert torch.equal(first[hook], second[hook]) == (hook not in ("post_localSGD", "noop")), hook


def refused(rank: int, option: str, level: str) -> str:
    model = nn.Linear(2, 2)
    of_zero = of_distributed("ZeroRedundancyOptimizer")
    optimizer = of_zero(model.parameters(), torch.optim.SGD, lr=0.1, **{option: True})
    with pytest.raises(UsageError) as error:
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert model.weight.dtype is torch.float32
    return str(error.value)


@pytest.mark.parametrize(
    ("option", "level"),
    [("parameters_as_bucket_view", "O2"), ("overlap_with_ddp", "O1"), ("overlap_with_ddp", "O2")],
)
def test_options_of_zero_that_are_refused(ranks: Ranks, option: str, level: str) -> None:
    assert f"{option}=True" in ranks.run(refused, option, level)[0]
