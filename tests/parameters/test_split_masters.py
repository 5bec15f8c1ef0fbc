"""PlainMasters in the state of a fused optimizer, brought from one form into another: no bit of them is lost."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from halfstep import amp, optimizers
from halfstep.kernels.storage import SPLIT, dense, plain, split
from halfstep.parameters.split import adapt, master_value, take_back_rounding
from tests.support.worlds import BF16, FP16

FP32 = torch.tensor([1.0 + 2.0**-8, -3.1415926, 2.0**-30, 0.0])  # the first one is a tie in bfloat16


def as_split() -> tuple[nn.Parameter, dict[str, Any]]:
    weight, remainder = split(FP32)
    return nn.Parameter(weight), {"remainder": remainder}


def as_plain(half: torch.dtype = BF16) -> tuple[nn.Parameter, dict[str, Any]]:
    return nn.Parameter(FP32.to(half)), {"master": FP32.clone()}


def test_what_has_the_right_form_stays() -> None:
    for made, storage in ((as_split(), SPLIT), (as_plain(), plain(BF16)), (as_plain(FP16), plain(FP16))):
        param, state = made
        weight, kept = param.detach().clone(), dict(state)
        adapt(param, state, storage)
        assert torch.equal(param, weight)
        assert state.keys() == kept.keys()
        assert all(state[name] is value for name, value in kept.items())


def test_a_master_of_another_dtype_becomes_fp32() -> None:
    for storage in (SPLIT, plain(BF16)):
        param, state = as_plain()
        state["master"] = FP32.double()
        assert torch.equal(master_value(param, state), FP32)
        adapt(param, state, storage)
        assert torch.equal(master_value(param, state), FP32)
        assert {value.dtype for value in state.values()} <= {torch.int16, torch.float32}


@pytest.mark.parametrize("half", [BF16, FP16], ids=["bf16", "fp16"])
def test_a_master_starts_from_its_weight(half: torch.dtype) -> None:
    param: Any = nn.Parameter(FP32.to(half).reshape(2, 2).t())
    state: dict[str, Any] = {}
    adapt(param, state, SPLIT if half is BF16 else plain(half))
    assert torch.equal(master_value(param, state), param.float())
    if half is BF16:
        assert (state["remainder"].dtype, state["remainder"].stride()) == (torch.int16, param.stride())


def test_without_a_master_there_is_nothing_to_keep() -> None:
    for param, state in (as_split(), as_plain()):
        adapt(param, state, dense(BF16))
        assert state == {}


def test_state_follows_its_parameter_to_another_device() -> None:
    for (_, state), storage in ((as_split(), SPLIT), (as_plain(), plain(BF16))):
        param = nn.Parameter(torch.empty(4, dtype=BF16, device="meta"))
        adapt(param, state, storage)
        assert [value.device.type for value in state.values()] == ["meta"]


def test_the_value_of_a_master_is_a_new_tensor() -> None:
    single = nn.Parameter(FP32.clone())
    for param, state in (as_split(), as_plain(), as_plain(FP16), (single, {})):
        value = master_value(param, state)
        assert value.dtype is torch.float32
        assert torch.equal(value, FP32)
        value.zero_()
        assert torch.equal(master_value(param, state), FP32)


def test_a_weight_that_was_written_to_is_the_value() -> None:
    param, state = as_plain()
    with torch.no_grad():
        param[0] = 7.0
    assert master_value(param, state).tolist() == [7.0, *FP32[1:].tolist()]


TIES = torch.tensor([1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8, -1.0 - 2.0**-8, 3.0])  # three lie half way between two weights


def test_a_weight_whose_ties_were_rounded_to_even_is_rounded_as_its_remainder_says() -> None:
    weight, remainder = split(TIES)
    param = nn.Parameter(TIES.to(BF16))
    assert not torch.equal(param, weight)
    take_back_rounding(param, remainder, TIES)
    assert torch.equal(param, weight)
    assert torch.equal(master_value(param, {"remainder": remainder}), TIES)


def test_a_weight_of_another_master_stays() -> None:
    _, remainder = split(TIES)
    for master in (TIES + 2.0**-12, TIES.roll(1) * 3):
        param = nn.Parameter(torch.full((4,), 5.0, dtype=BF16))
        take_back_rounding(param, torch.where(split(master)[1] == remainder, remainder + 1, remainder), master)
        assert param.tolist() == [5.0] * 4


def cast_then_attached(model: Any, make: Any) -> Any:
    weights = {p: p.detach() for p in model.parameters()}
    amp.decorate(model, level="O2", dtype="bfloat16", save_dtype="float32")
    return amp.give_masters(make(model.parameters()), weights)


def initialized(model: Any, make: Any) -> Any:
    return amp.initialize(model, make(model.parameters()), opt_level="O2", dtype=BF16, loss_scale=1.0, verbosity=0)[1]


MAKERS: dict[str, Any] = {
    "torch's AdamW": lambda params: torch.optim.AdamW(params, lr=0.0, weight_decay=0.0),
    "FusedAdam": lambda params: optimizers.FusedAdam(params, lr=0.0),
    "FusedSGD": lambda params: optimizers.FusedSGD(params, lr=0.0, momentum=0.9),
}


@pytest.mark.parametrize("cast_first", [True, False], ids=["cast, model, optimizer", "model, cast, optimizer"])
@pytest.mark.parametrize("begin", [initialized, cast_then_attached])
@pytest.mark.parametrize("make", MAKERS)
def test_ties_survive_a_resume_in_any_order(make: str, begin: Any, cast_first: bool) -> None:
    def model_of(state: Any) -> Any:
        model: Any = nn.Linear(4, 1, bias=False)
        model.load_state_dict(state)
        return model

    model = model_of({"weight": TIES[None]})
    optimizer = begin(model, MAKERS[make])
    model(torch.ones(2, 4, dtype=model.weight.dtype)).float().sum().backward()
    optimizer.step()
    saved, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    assert torch.equal(saved["weight"], TIES[None])
    again = nn.Linear(4, 1, bias=False) if cast_first else model_of(saved)
    other = begin(again, MAKERS[make])
    if cast_first:
        again.load_state_dict(saved)
    other.load_state_dict(state)
    assert torch.equal(next(iter(amp.master_params(other))), TIES[None])
    assert torch.equal(again.weight, model.weight)
