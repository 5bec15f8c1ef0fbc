"""Checkpoints of shards: at other levels and without shards, written while training goes on, and as safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from halfstep import amp
from tests.distributed.test_sharded_levels import assert_near, cut, loss_of, net
from tests.support.processes import Ranks
from tests.support.shards import load, save, state_dicts, whole
from tests.support.worlds import BF16, advance, start_amp


def prepared(kind: str, level: str) -> tuple[Any, Any]:
    """``kind``: "alone" is a whole model on every rank."""
    return start_amp(
        net() if kind == "alone" else cut(kind, net(kind))[0], torch.optim.AdamW, level, dtype=BF16, lr=0.01
    )


def step(model: Any, optimizer: Any, i: int) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(i))
    advance(loss_of(model(x), torch.tensor(1.0)), optimizer)


def state_of(model: Any, optimizer: Any) -> list[torch.Tensor]:
    """Masters, both moments and the count of each parameter."""
    states = [optimizer.state[p] for p in model.parameters()]
    names = ("exp_avg", "exp_avg_sq", "step")
    return [*map(whole, amp.master_params(optimizer)), *(whole(state[name]) for state in states for name in names)]


def crossed(
    rank: int, folder: str, saved: tuple[str, str], loaded: tuple[str, str]
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """What was saved, what another model has when it is loaded, and after one more step of each, that of the other."""
    model, optimizer = prepared(*saved)
    for i in range(2):
        step(model, optimizer, i)
    save(model, optimizer, folder)
    expected = state_of(model, optimizer)
    amp.deactivate()
    model, optimizer = prepared(*loaded)
    step(model, optimizer, 2)  # which is to be forgotten
    load(model, optimizer, folder)
    found = state_of(model, optimizer)
    step(model, optimizer, 2)
    amp.deactivate()
    return expected, found, state_of(model, optimizer)


CROSSINGS = [
    (("fsdp", "O2"), ("alone", "O2")),
    (("alone", "O2"), ("fsdp", "O2")),
    (("fsdp", "O2"), ("fsdp", "O0")),
    (("fsdp", "O0"), ("alone", "O2")),
    (("alone", "O2"), ("alone", "O1")),
]


@pytest.mark.parametrize(("saved", "loaded"), CROSSINGS)
def test_a_sharded_checkpoint_loads_at_another_level_and_without_shards(
    ranks: Ranks, saved: tuple[str, str], loaded: tuple[str, str], tmp_path: Path
) -> None:
    for expected, found, after in ranks.run(crossed, str(tmp_path), saved, loaded):
        assert_near(found, expected, 0.0)
        assert any(not torch.equal(a, b) for a, b in zip(after, found, strict=True))  # and it trains on


def meanwhile(rank: int, folder: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """A checkpoint that is written in another thread, on a group of its own, while three steps are taken."""
    import torch.distributed.checkpoint as dcp

    group = dist.new_group(backend="gloo")
    model, optimizer = prepared("fsdp", "O2")
    step(model, optimizer, 0)
    expected = state_of(model, optimizer)
    saving: Any = dcp.async_save(state_dicts(model, optimizer), checkpoint_id=folder, process_group=group)
    for i in range(1, 4):
        step(model, optimizer, i)
        optimizer.clip_master_grads(1.0)  # an all-reduce of ours
    saving.result()
    load(model, optimizer, folder)
    amp.deactivate()
    return expected, state_of(model, optimizer)


def test_a_checkpoint_written_while_training_goes_on_is_of_one_step(ranks: Ranks, tmp_path: Path) -> None:
    for expected, found in ranks.run(meanwhile, str(tmp_path)):
        assert_near(found, expected, 0.0)


def gathered(rank: int, file: str) -> list[torch.Tensor]:
    """Rank 0 writes the whole weights."""
    from safetensors.torch import save_file
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    model, optimizer = prepared("fsdp", "O2")
    step(model, optimizer, 0)
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        save_file(weights, file)
    masters = [whole(p) for p in amp.master_params(optimizer)]
    amp.deactivate()
    return masters


def test_safetensors_have_the_masters_of_shards(ranks: Ranks, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    file = str(tmp_path / "model.safetensors")
    expected, _ = ranks.run(gathered, file)
    model, optimizer = prepared("alone", "O2")
    model.load_state_dict(safetensors.load_file(file))
    assert_near(list(amp.master_params(optimizer)), expected, 0.0)
