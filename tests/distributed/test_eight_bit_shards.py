"""8-bit moments of FSDP2 shards: blocks of the local part, and checkpoints of fp32 moments that load on any mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from halfstep import optimizers
from tests.distributed.test_fsdp import whole
from tests.support import shards
from tests.support.processes import Ranks, ranks_of
from tests.support.worlds import unscaled_step


def make(state_dtype: Any = "8bit") -> tuple[Any, Any]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(64, 65), nn.Tanh(), nn.Linear(65, 64)).bfloat16()  # shards of unequal size
    fully_shard(model, mesh=shards.mesh())
    return model, optimizers.FusedAdam(model.parameters(), lr=0.01, master_weights="split", state_dtype=state_dtype)


def some_steps(model: Any, optimizer: Any, first: int, last: int) -> None:
    for step in range(first, last):
        torch.manual_seed(step)
        unscaled_step(model(torch.randn(8, 64).bfloat16()).float().square().mean(), optimizer)


def found_in(model: Any, optimizer: Any) -> list[Any]:
    """The weights whole, and the state that lies here."""
    states = [dict(sorted(optimizer.state[p].items())) for p in model.parameters()]
    kept = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    return [*whole(model.parameters()), *(getattr(t, "to_local", lambda t=t: t)().clone() for t in kept)]


def save(rank: int, folder: str) -> list[Any]:
    model, optimizer = make()
    some_steps(model, optimizer, 0, 3)
    for p in model.parameters():
        state = optimizer.state[p]
        assert ("exp_avg_codes" in state) == (p.dim() == 2)  # by the size of the whole
        if p.dim() == 2:
            assert state["exp_avg_absmax"].numel() == -(-p.to_local().numel() // 256)
    before = found_in(model, optimizer)
    state = shards.state_dicts(model, optimizer)["optimizer"]["state"]
    assert not [key for kept in state.values() for key in kept if "codes" in key or "absmax" in key]
    shards.save(model, optimizer, folder)
    assert all(map(torch.equal, before, found_in(model, optimizer)))
    some_steps(model, optimizer, 3, 5)
    return found_in(model, optimizer)


def resume(rank: int, folder: str, state_dtype: Any) -> list[Any]:
    model, optimizer = make(state_dtype)
    shards.load(model, optimizer, folder)
    some_steps(model, optimizer, 3, 5)
    return found_in(model, optimizer)


@pytest.mark.parametrize(("world", "state_dtype"), [(2, "8bit"), (1, "8bit"), (2, None)], ids=str)
def test_saved_on_two_ranks_and_loaded(ranks: Ranks, tmp_path: Path, world: int, state_dtype: Any) -> None:
    """On the same mesh with the same form to the bit; on another, or into fp32 state, as near as 8 bits are."""
    expected = ranks.run(save, str(tmp_path))
    found = ranks_of(world).run(resume, str(tmp_path), state_dtype)
    for ours, theirs in zip(found, expected, strict=False):
        if world == 2 and state_dtype:
            assert len(ours) == len(theirs)
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        torch.testing.assert_close([a.float() for a in ours[:4]], [b.float() for b in theirs[:4]], rtol=0.02, atol=5e-3)
