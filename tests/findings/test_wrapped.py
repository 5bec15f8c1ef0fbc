"""Models in DistributedDataParallel and FSDP2, in a process group of one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import halfstep
from tests.support.processes import one_rank
from tests.support.worlds import advance, start_amp, with_optimizer

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed"),
    pytest.mark.filterwarnings("ignore"),  # of torch, which finds no accelerator
]


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with one_rank():
        yield


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 8)).to(dtype)


def sharded(dtype: torch.dtype = torch.float32, **policy: Any) -> nn.Sequential:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 8)).to(dtype)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)), mp_policy=MixedPrecisionPolicy(**policy))
    return model


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_ddp(dtype: torch.dtype) -> None:
    model, optimizer = start_amp(net(), torch.optim.AdamW, "O2", dtype=dtype)
    wrapper = nn.parallel.DistributedDataParallel(model)
    for _ in range(2):
        assert halfstep.check(wrapper, optimizer, batch=torch.randn(8, 32)) == []
        advance(wrapper(torch.randn(8, 32)).square().mean(), optimizer)


def test_ddp_without_masters() -> None:
    wrapper = nn.parallel.DistributedDataParallel(net(torch.bfloat16))
    found = halfstep.check(wrapper, torch.optim.AdamW(wrapper.parameters(), lr=1e-6))
    assert {each.code for each in found} == {"HS101", "HS102", "HS103", "HS104"}
    assert found[0].where.startswith("*")


@pytest.mark.parametrize(
    ("params", "reduced", "found"),
    [
        (torch.bfloat16, None, ["HS114"]),
        (torch.bfloat16, torch.bfloat16, ["HS114"]),
        (torch.bfloat16, torch.float32, []),
        (None, None, []),
    ],
)
def test_fsdp2(params: torch.dtype | None, reduced: torch.dtype | None, found: list[str]) -> None:
    model, optimizer = with_optimizer(sharded(param_dtype=params, reduce_dtype=reduced), torch.optim.AdamW)
    model(torch.randn(4, 32)).float().square().mean().backward()
    optimizer.step()
    findings = halfstep.check(model, optimizer)
    assert [each.code for each in findings] == found
    assert [each.where for each in findings] == ["the model"] * len(found)


def test_fsdp2_computes_the_loss_in_16_bits() -> None:
    """Modalities#464: MixedPrecisionPolicy installs no autocast."""
    model = sharded(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    x, y = torch.randn(4, 32), torch.randint(8, (4,))
    found = halfstep.check(model, batch=lambda: nn.functional.cross_entropy(model(x), y))
    right = halfstep.check(model, batch=lambda: nn.functional.cross_entropy(model(x).float(), y))
    assert [each.code for each in found] == ["HS105"]
    assert right == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_shards_in_16_bits_are_predicted_and_measured(dtype: torch.dtype) -> None:
    model, optimizer = with_optimizer(sharded(dtype), torch.optim.AdamW, lr=1e-7, eps=1e-3)
    watch = halfstep.watch(optimizer, every=1)
    model(torch.randn(16, 32).to(dtype)).float().square().mean().backward()
    optimizer.step()
    predicted = halfstep.check(model, optimizer)[0]
    measured = watch.findings()[0]
    assert predicted.code == measured.code == "HS101"
    assert predicted.evidence["lost"] == pytest.approx(measured.evidence["lost"], abs=0.01)
