"""8-bit state beside that of bitsandbytes: the same map and blocks, codes at least as near, and the same steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from halfstep import optimizers
from halfstep.kernels.blockwise import BLOCK, SIGNED, UNSIGNED, dynamic_map, quantize
from halfstep.kernels.storage import Storage
from tests.integrations.test_unchanged import missing

bitsandbytes = pytest.importorskip("bitsandbytes", reason=missing("bitsandbytes"))


@pytest.mark.parametrize("storage", [SIGNED, UNSIGNED], ids=["signed", "unsigned"])
def test_the_map_and_the_codes(storage: Storage) -> None:
    numbers = bitsandbytes.functional.create_dynamic_map(signed=storage.signed)
    assert torch.equal(numbers, dynamic_map(storage))
    torch.manual_seed(0)
    values = torch.randn(10000) * 10 ** (-8 * torch.rand(10000))
    values = values if storage.signed else values.abs()
    codes, absmax = quantize(values, storage)
    theirs, their_absmax = torch.ops.bitsandbytes.quantize_blockwise(values, numbers, BLOCK)
    assert torch.equal(absmax, their_absmax)
    # Its CPU kernel looks places up in a table, and is now and then some numbers away from the nearest.
    scaled = values / absmax.repeat_interleave(BLOCK)[: len(values)]
    lost, lost_there = ((numbers[each.int()] - scaled).abs() for each in (codes, theirs))
    assert (lost <= lost_there + 4e-7).all()
    assert (lost_there - lost).max() < 0.003


@pytest.mark.parametrize(
    ("name", "ours", "exact", "settings"),
    [
        ("AdamW8bit", optimizers.FusedAdam, torch.optim.AdamW, {"weight_decay": 0.1}),
        ("Adam8bit", optimizers.FusedAdam, torch.optim.AdamW, {"weight_decay": 0.0}),
        ("SGD8bit", optimizers.FusedSGD, torch.optim.SGD, {"momentum": 0.9}),
    ],
)
def test_steps_are_as_near_to_those_of_fp32_state(name: str, ours: Any, exact: Any, settings: dict[str, Any]) -> None:
    params = []
    for make in (ours, getattr(bitsandbytes.optim, name), exact):
        torch.manual_seed(0)
        param = torch.nn.Parameter(torch.randn(64, 100))
        optimizer = make([param], lr=1e-2, **settings, **({"state_dtype": "8bit"} if make is ours else {}))
        for _ in range(10):
            param.grad = torch.randn(64, 100) * torch.linspace(0.01, 1, 100)
            optimizer.step()
        params.append(param.detach())
    here, there, reference = params
    lost, lost_there = ((each - reference).square().mean().sqrt() for each in (here, there))
    assert 0 < lost <= 1.05 * lost_there
    torch.manual_seed(0)
    moved = (reference - torch.randn(64, 100)).square().mean().sqrt()
    assert (here - there).square().mean().sqrt() < 0.05 * moved
