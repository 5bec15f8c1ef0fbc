"""What one rank sends in a step of 4, 8 and 1,000 ranks. Nobody receives it: the process group is a fake one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep import amp, optimizers
from tests.support.worlds import BF16, FP16, advance, unscaled_step, with_optimizer

WORLDS = (4, 8, 1000)

Call = tuple[str, int]
"""A collective operation, and the bytes of the largest tensor that it takes: all parts together."""


class Sent(TorchDispatchMode):
    """Lists the collective operations of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensors = [t for arg in args for t in torch.utils._pytree.tree_leaves(arg) if isinstance(t, torch.Tensor)]
            self.calls.append((func.__name__.split(".")[0], max((t.nbytes for t in tensors), default=0)))
        return func(*args, **(kwargs or {}))


@contextmanager
def world_of(size: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        amp.deactivate()
        dist.destroy_process_group()


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 1000), nn.ReLU(), nn.LayerNorm(1000))  # cut without padding in all worlds


def wrapped(kind: str, model: Any, size: int, dtype: torch.dtype | None) -> Any:
    """``dtype``: what FSDP2 is told to compute in; None leaves it to halfstep."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if kind == "ddp":
        return model
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    names = ("replicate", "shard")
    mesh = (
        init_device_mesh("cpu", (size,))
        if kind == "fsdp"
        else init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=names)
    )
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return model


def of_halfstep(kind: str, size: int, dtype: torch.dtype, *, clips: bool) -> list[Call]:
    with world_of(size):
        model = wrapped(kind, net(), size, None)
        optimizer: Any = optimizers.FusedAdam(model.parameters(), max_grad_norm=1.0 if clips else None)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2", dtype=dtype, verbosity=0)
        parallel = nn.parallel.DistributedDataParallel(model) if kind == "ddp" else model
        for _ in range(3):  # the first two make what is made once
            with Sent() as sent:
                advance(parallel(torch.ones(4, 8)).float().square().mean(), optimizer)
        return sent.calls


def averages(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    dist.all_reduce(bucket.buffer())
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def of_torch(kind: str, size: int, dtype: torch.dtype) -> list[Call]:
    with world_of(size):
        model, optimizer = with_optimizer(wrapped(kind, net(), size, dtype), torch.optim.AdamW, fused=True)
        parallel = nn.parallel.DistributedDataParallel(model) if kind == "ddp" else model
        if kind == "ddp":
            parallel.register_comm_hook(None, averages)  # the fake group has no future for the reducer's own
        for _ in range(3):
            with Sent() as sent:
                unscaled_step(parallel(torch.ones(4, 8)).float().square().mean(), optimizer)
        return sent.calls


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "clips", "dtype"),
    # HSDP on 1,000 ranks makes 502 groups, which takes a second.
    [("fsdp", False, BF16), ("fsdp", True, FP16), ("hsdp", True, FP16), ("ddp", True, BF16), ("ddp", False, FP16)],
)
def test_nothing_that_a_step_sends_grows_with_the_number_of_ranks(kind: str, clips: bool, dtype: torch.dtype) -> None:
    found = [of_halfstep(kind, size, dtype, clips=clips) for size in WORLDS]
    assert found[0] == found[1] == found[2]
    assert {name for name, _ in found[0]} <= {"allreduce_", "_allgather_base_", "_reduce_scatter_base_"}
    extra = list(found[0])
    for call in of_torch(kind, 8, dtype):  # all that torch sends for this model, in as many bytes
        extra.remove(call)
    flag, norms = (
        [("allreduce_", 4)],
        [("allreduce_", 8 * 4)],
    )  # whether gradients overflowed; a norm for each parameter
    facts = [("allreduce_", 3 * 8)]  # what DistributedDataParallel's ranks tell each other before a step
    expected = facts if kind == "ddp" else norms if clips else []
    assert sorted(extra) == sorted(expected + (flag if dtype is FP16 else []))
