"""Where the masters of an optimizer are kept, and what its groups hold while it steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from halfstep import amp, optimizers
from halfstep.kernels.shards import local
from halfstep.kernels.storage import SPLIT, Storage, plain
from halfstep.parameters import held_masters
from halfstep.parameters.masters import in_place, table_of, unsaved
from halfstep.parameters.outside_writes import StepWrites
from halfstep.parameters.plain import Plain
from halfstep.parameters.split import adapt, master_value
from halfstep.parameters.table import Slot, record_of
from tests.support.worlds import BF16, FP32, scaled_step, start_amp

needs_grad_dtype = pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no grad_dtype")


def params(dtype: torch.dtype) -> tuple[nn.Parameter, nn.Parameter]:
    return nn.Parameter(torch.zeros(2, dtype=dtype)), nn.Parameter(torch.zeros(2, dtype=dtype))


@needs_grad_dtype
@pytest.mark.parametrize("own", [True, False])
def test_masters_are_kept_by_the_optimizer_if_it_can_and_may(own: bool) -> None:
    half, _ = params(BF16)
    optimizer = optimizers.FusedSGD([half], lr=1.0)
    table, outside = table_of(optimizer, True, {id(half): torch.full((2,), 2.0**-140)}, own=own)
    assert (table.has_masters, outside is None) == (True, own)
    assert held_masters.master_of(half).tolist() == [2.0**-140] * 2  # type: ignore[union-attr]


def test_masters_elsewhere_are_not_made_here() -> None:
    half, single = *params(BF16)[:1], params(FP32)[0]
    optimizer = optimizers.FusedSGD([half, single], lr=1.0)
    table, outside = table_of(optimizer, "elsewhere")
    assert (table.has_masters, outside) == (True, None)
    assert (table.has_master(half), table.has_master(single)) == (True, False)
    half.requires_grad_(False)
    assert not table.has_master(half)
    assert held_masters.master_of(half) is None
    assert unsaved(table) == []
    with in_place(outside):
        assert optimizer.param_groups[0]["params"][0] is half


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("saved", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_masters_are_loaded_from_values_of_any_dtype(saved: torch.dtype, fused: bool, stepped: bool) -> None:
    model: Any = nn.Linear(2, 2)  # two 16-bit numbers have the size of one fp32 number
    model, optimizer = start_amp(model, torch.optim.SGD, "O2", dtype=BF16, fused=fused, lr=0.1)
    if stepped:
        scaled_step(model(torch.ones(1, 2)).float().sum(), optimizer)
    values = {name: (torch.arange(v.numel()).view_as(v) / 3).to(saved) for name, v in model.state_dict().items()}
    model.load_state_dict(values)
    for value, master in zip(values.values(), amp.master_params(optimizer), strict=True):
        assert torch.equal(master.detach() + 0, value.float())


def test_a_closure_may_bring_16_bit_gradients() -> None:
    model: Any = nn.Linear(2, 2, bias=False)
    model, optimizer = start_amp(model, torch.optim.SGD, "O2", dtype=BF16, loss_scale=1.0, fused=False, lr=2.0**-12)
    before = model.state_dict()["weight"].clone()

    def closure() -> float:
        if hasattr(torch.Tensor, "grad_dtype"):
            model.weight.grad_dtype = None
        model.weight.grad = torch.ones_like(model.weight)
        return 0.0

    optimizer.step(closure)
    torch.testing.assert_close(model.state_dict()["weight"], before - 2.0**-12, rtol=0, atol=2.0**-24)


@pytest.fixture
def sharded() -> Iterator[nn.Parameter]:
    """A bfloat16 parameter that is shared out to one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield nn.Parameter(distribute_tensor(torch.zeros(2, dtype=BF16), init_device_mesh("cpu", (1,)), [Shard(0)]))
    dist.destroy_process_group()


@pytest.mark.parametrize("storage", [SPLIT, plain(BF16)], ids=lambda storage: storage.kind)
def test_the_form_of_a_sharded_master_changes_as_that_of_a_whole_one(sharded: nn.Parameter, storage: Storage) -> None:
    """1 and half of its last bit: a tie, which the two forms round to different sides."""
    state: dict[str, Any] = {"master": torch.full_like(sharded.detach(), 1.0 + 2**-8, dtype=FP32)}
    local(sharded.detach()).fill_(1.0)
    for form in (SPLIT, plain(BF16), storage):
        adapt(sharded, state, form)
        (kept,) = state.values()
        assert (type(kept), kept.placements) == (type(sharded.data), sharded.placements)  # type: ignore[attr-defined]
        assert local(sharded.detach()).tolist() == [1.0 + 2**-7 if form is SPLIT else 1.0] * 2
        assert local(master_value(sharded, state)).tolist() == [1.0 + 2**-8] * 2


@pytest.mark.parametrize("wrote", ["weight", "master"])
def test_writes_of_a_step_to_sharded_weights(wrote: str, sharded: nn.Parameter) -> None:
    writes = StepWrites()
    beside = Plain(sharded, sharded.detach().float())
    beside.in_place, master = True, beside.tensor
    writes.begin([Slot(sharded, 0, record_of(sharded), master=beside)], [master])
    local((sharded if wrote == "weight" else master).detach()).fill_(1.0)
    writes.end()
    assert local(master.detach()).tolist() == [1.0, 1.0]


def test_an_added_group_leaves_saved_masters_to_the_state_dict_of_the_model() -> None:
    model, extra = nn.Linear(2, 2), nn.Linear(2, 2).bfloat16()
    model, optimizer = start_amp(model, torch.optim.SGD, "O2", dtype=BF16, fused=False, lr=0.1)
    assert model.state_dict()["weight"].dtype is FP32
    optimizer.add_param_group({"params": list(extra.parameters())})
    saved = optimizer.state_dict()
    added = saved["param_groups"][1]["params"]
    assert sorted(key for key, state in saved["state"].items() if "master" in state) == added
