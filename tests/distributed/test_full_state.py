"""Optimizer state of sharded 16-bit weights with masters, gathered whole or saved in parts: the same to the bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from halfstep import optimizers
from halfstep.kernels.storage import join
from halfstep.torch_internals.torch_compat import HAS_GRAD_DTYPE
from tests.distributed.test_fsdp import make, net, some_steps, whole
from tests.support.processes import Ranks
from tests.support.python import python
from tests.support.worlds import FP32

pytestmark = pytest.mark.exhaustive  # they start processes


def values(model: Any, optimizer: Any) -> list[torch.Tensor]:
    """The weights, the masters and the moments, whole."""
    found = whole(model.parameters())
    for param in model.parameters():
        state = optimizer.state[param]
        found += whole(state[name] for name in ("exp_avg", "exp_avg_sq"))
        kept = [state["master"]] if "master" in state else [param.detach(), state["remainder"]]
        local = [part.to_local() for part in kept]
        master = local[0] if len(local) == 1 else join(*local)
        like = state["exp_avg"]
        found += whole([type(like).from_local(master, like.device_mesh, like.placements, shape=like.shape,
                                              stride=like.stride(), run_check=False)])  # fmt: skip
    return found


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def through(rank: int, masters: Any, full: bool, broadcast: bool) -> dict[str, Any]:
    """Save after two steps and load into another model of other weights; both go on for two."""
    from torch.distributed.checkpoint import state_dict as dcp

    model, optimizer = make(masters)
    some_steps(model, optimizer, 0, 2)
    saved = values(model, optimizer)
    options = dcp.StateDictOptions(full_state_dict=full, cpu_offload=broadcast)  # then rank 0 alone has it
    # What is not gathered shares memory with the model it is of.
    weights, state = copy.deepcopy(dcp.get_state_dict(model, optimizer, options=options))
    assert_same(values(model, optimizer), saved)
    for kept in state.get("state", {}).values():
        assert "remainder" not in kept
        assert kept["master"].dtype is FP32
    other, another = make(masters)
    with torch.no_grad():
        for param in other.parameters():
            param.add_(1.0)
    some_steps(other, another, 3, 4)
    options = dcp.StateDictOptions(full_state_dict=full, broadcast_from_rank0=broadcast)
    if broadcast and rank:
        weights, state = {}, {}
    loaded = copy.deepcopy((weights, state))  # torch changes what it is given
    dcp.set_model_state_dict(other, loaded[0], options=options)
    dcp.set_optimizer_state_dict(other, another, loaded[1], options=options)
    for m, o in ((model, optimizer), (other, another)):
        some_steps(m, o, 4, 6)
    assert_same(values(other, another), values(model, optimizer))
    return {"weights": weights, "state": state["state"] if full and state else {}, "saved": saved}


@pytest.mark.parametrize("masters", ["split", "plain"])
@pytest.mark.parametrize(("full", "broadcast"), [(False, False), (True, False), (True, True)])
def test_saved_and_loaded_bit_for_bit(ranks: Ranks, masters: str, full: bool, broadcast: bool) -> None:
    first, second = ranks.run(through, masters, full, broadcast)
    assert_same(first["saved"], second["saved"])
    if full:
        assert_same([kept["master"] for kept in first["state"].values()], first["saved"][6::3])


def test_a_whole_state_steps_one_process_as_it_stepped_the_shards(ranks: Ranks) -> None:
    first, _ = ranks.run(through, "split", True, False)
    model = net().bfloat16()
    model.load_state_dict(first["weights"])
    optimizer = optimizers.FusedAdam(model.parameters(), lr=0.02, master_weights="split")
    empty = optimizer.state_dict()
    optimizer.load_state_dict({**empty, "state": dict(enumerate(first["state"].values()))})
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    masters = [join(p.detach(), optimizer.state[p]["remainder"]) for p in model.parameters()]
    assert_same(masters, [kept["master"] for kept in first["state"].values()])


def test_unsharded_state_keeps_its_remainders() -> None:
    param = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = optimizers.FusedAdam([param], master_weights="split")
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["remainder"] is optimizer.state[param]["remainder"]


@pytest.mark.skipif(not HAS_GRAD_DTYPE, reason="before torch 2.13 a gradient has the dtype of its parameter")
@pytest.mark.parametrize("imported", ["before", "after", "after, in two ways"])
def test_the_state_of_an_optimizer_that_has_not_stepped(imported: str) -> None:
    """The module that saves it may be imported after the optimizer was attached: it is large."""
    name = "torch.distributed.checkpoint.state_dict"
    program = [
        "import importlib.util, sys, torch",
        f"import {name}" if imported == "before" else "",
        "from halfstep import amp",
        "model = torch.nn.Linear(4, 4)",
        "make = torch.optim.RMSprop if 'two' in sys.argv else torch.optim.AdamW",
        "optimizer = make(model.parameters(), lr=0.1)",
        "model, optimizer = amp.initialize(model, optimizer, opt_level='O2', dtype=torch.bfloat16)",
        f"assert ('{name}' in sys.modules) == {imported == 'before'}",
        f"importlib.util.find_spec('{name}')" if "two" in imported else "",
        f"from {name} import get_optimizer_state_dict",
        "assert not [finder for finder in sys.meta_path if 'halfstep' in str(finder)]",
        "saved = get_optimizer_state_dict(model, optimizer)",
        "assert set(saved['state']) == {'weight', 'bias'}, saved",
        "assert all(p.grad is None for p in model.parameters())",
        "loss = model(torch.ones(4, 4)).float().square().mean()",
        "loss.backward(retain_graph=True)",
        "assert {p.grad.dtype for p in model.parameters()} == {torch.float32}, 'of a plain pass'",
        "optimizer.zero_grad()",
        "with amp.scale_loss(loss, optimizer) as scaled_loss:",
        "    scaled_loss.backward()",
        "assert {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}, 'of a block'",
    ]
    run = python("-c", "\n".join(program), *imported.split())
    assert run.returncode == 0, run.stderr
