"""``PlainMasters``: fp32 values behind 16-bit parameters, which take their places in the optimizer while it steps."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from halfstep.core.errors import UsageError
from halfstep.parameters.ledger import get_grads, set_grads
from halfstep.parameters.plain import PlainMasters
from halfstep.parameters.table import OptimizerTable
from tests.support.worlds import BF16, FP16

FINE = 1.0 + 2.0**-12  # rounds to 1 in 16 bits


def param(value: float = 1.0, dtype: torch.dtype = BF16, *, grad: float | None = 1.0) -> nn.Parameter:
    made = nn.Parameter(torch.full((2,), value, dtype=dtype))
    if grad is not None:
        set_grads([made], [torch.full((2,), grad)])
    return made


def sgd(*params: nn.Parameter, lr: float = 2.0**-12, momentum: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=momentum)


def plain_masters(optimizer: Any, originals: dict[int, torch.Tensor] | None = None) -> PlainMasters:
    return PlainMasters(OptimizerTable.of(optimizer, has_masters=True), originals)


def step(masters: PlainMasters, optimizer: torch.optim.Optimizer) -> None:
    masters.enter()
    optimizer.step()
    masters.leave()


def master_of(masters: PlainMasters, p: torch.Tensor) -> float:
    master = masters.table.find(p)
    assert master is not None
    return float(master.read().detach()[0])


@pytest.mark.parametrize("moved", [False, True])
def test_what_is_written_to_a_parameter_in_a_step_counts_unless_its_master_has_moved(moved: bool) -> None:
    p = param()
    optimizer = sgd(p, lr=0.5)
    masters = plain_masters(optimizer)
    masters.enter()
    with torch.no_grad():
        p.fill_(5.0)
    assert master_of(masters, p) == 1.0
    if moved:
        optimizer.step()
    masters.leave()
    assert p.tolist() == ([0.5, 0.5] if moved else [5.0, 5.0])
    assert master_of(masters, p) == p[0]
    with torch.no_grad():
        p.fill_(3.0)
    assert master_of(masters, p) == 3.0


def test_data_that_was_used_before_a_step_is_no_write_in_it() -> None:
    p = param()
    optimizer = sgd(p)
    masters = plain_masters(optimizer)
    masters.enter()
    masters.leave()
    p.data.fill_(2.0)
    masters.enter()
    optimizer.param_groups[0]["params"][0].data.add_(1.0)  # gives the master no new version
    masters.leave()
    assert p.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("change", ["cleared", "replaced", "zeroed", "left"])
def test_what_a_step_does_to_gradients_reaches_the_parameters(change: str) -> None:
    p, single = param(grad=2.0), param(dtype=torch.float32, grad=2.0)
    optimizer = sgd(p, single)
    masters = plain_masters(optimizer)
    masters.enter()
    for each in optimizer.param_groups[0]["params"]:
        if change == "cleared":
            each.grad = None
        elif change == "replaced":
            each.grad = each.grad * 3
        elif change == "zeroed":
            each.grad.zero_()
    masters.leave()
    wanted = {"cleared": None, "replaced": [6.0, 6.0], "zeroed": [0.0, 0.0], "left": [2.0, 2.0]}[change]
    assert [None if grad is None else grad.tolist() for grad in get_grads([p, single])] == [wanted, wanted]


def test_state_of_16_bits_becomes_fp32_and_the_rest_stays() -> None:
    p = param()
    optimizer = sgd(p)
    buffer, count = torch.ones(2, dtype=BF16), torch.tensor(3)
    optimizer.state[p] = {"momentum_buffer": buffer, "count": count, "name": "p"}
    plain_masters(optimizer)
    state = optimizer.state[p]
    assert (state["momentum_buffer"].dtype, state["count"], state["name"]) == (torch.float32, count, "p")


def test_state_of_a_model_that_was_float64_becomes_fp32() -> None:
    p = param(dtype=torch.float64, grad=None)
    p.grad = torch.ones_like(p)
    optimizer = torch.optim.Adam([p], lr=0.5)
    optimizer.step()
    p.grad = None
    p.data = p.data.to(BF16)
    set_grads([p], [torch.ones(2)])
    step(plain_masters(optimizer), optimizer)
    assert {value.dtype for value in optimizer.state[p].values()} == {torch.float32}


def test_state_is_carried_from_step_to_step_wherever_it_came_from() -> None:
    p, q = param(), param(dtype=torch.float32)
    optimizer = sgd(p, q)
    masters = plain_masters(optimizer)
    step(masters, optimizer)
    step(masters, optimizer)
    for state in optimizer.state.values():
        assert state["momentum_buffer"][0] == pytest.approx(1.9)
    optimizer.state[p] = {"momentum_buffer": torch.full((2,), 10.0)}  # an entry replaced
    step(masters, optimizer)
    assert optimizer.state[p]["momentum_buffer"][0] == pytest.approx(10.0)
    optimizer.state.clear()
    step(masters, optimizer)
    assert optimizer.state[p]["momentum_buffer"][0] == 1.0
    saved = optimizer.state_dict()
    saved["state"][0]["momentum_buffer"] = torch.full((2,), 20.0)
    masters.enter()
    optimizer.load_state_dict(saved)  # makes a new map
    masters.leave()
    assert {id(key) for key in optimizer.state} == {id(p), id(q)}
    step(masters, optimizer)
    assert optimizer.state[p]["momentum_buffer"][0] == pytest.approx(19.0)


# ---- writes to parameters


@torch.no_grad()
def test_layouts_and_dtypes_that_mix_are_found_too() -> None:
    wide = nn.Parameter(torch.ones(2, 3, dtype=BF16).t())  # not contiguous
    ps = [wide, param(dtype=FP16), nn.Parameter(torch.ones((), dtype=BF16)), nn.Parameter(torch.ones(0, dtype=BF16))]
    optimizer = sgd(*ps)
    masters = plain_masters(optimizer, {id(p): torch.full(p.shape, FINE) for p in ps})
    masters.adopt()
    wide[2, 1], ps[1][0] = 3.0, 4.0
    expected = torch.full((3, 2), FINE)
    expected[2, 1] = 3.0
    found = [master for _, master in masters.pairs()]
    assert torch.equal(found[0], expected)
    assert [master.tolist() for master in found[1:]] == [[4.0, FINE], FINE, []]


class StepsOnData(torch.optim.SGD):
    """As old optimizers are written: it changes no version of what it steps on."""

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.data.add_(p.grad, alpha=-(2.0**-12))


class StepsOnItsOwnList(StepsOnData):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1.0)
        self.own = list(params)

    def step(self, closure: Any = None) -> None:
        for p in self.own:
            p.data.sub_(0.5)


def test_a_step_that_writes_through_data_moves_masters() -> None:
    p = param()
    optimizer = StepsOnData([p], lr=1.0)
    masters = plain_masters(optimizer)
    for i in range(1, 33):
        step(masters, optimizer)
        assert master_of(masters, p) == 1.0 - i * 2.0**-12
    assert p.tolist() == [1.0 - 2.0**-7] * 2


def test_a_step_that_writes_through_data_of_a_list_of_its_own_is_honoured() -> None:
    p = param(8.0)
    optimizer = StepsOnItsOwnList([p])
    masters = plain_masters(optimizer)
    for i in range(1, 4):
        step(masters, optimizer)
        assert p.tolist() == [8.0 - 0.5 * i] * 2
        assert master_of(masters, p) == 8.0 - 0.5 * i


def test_a_parameter_that_changed_its_dtype_is_refused() -> None:
    first, p = param(), param()
    optimizer = sgd(first, p)
    masters = plain_masters(optimizer)
    masters.adopt()
    p.data = p.data.float()
    with pytest.raises(UsageError, match=r"weight of shape \(2,\) was cast to bfloat16 and is float32 now"):
        masters.pairs()


# ---- parameters that leave


def test_a_resting_master_hears_of_writes_and_comes_back() -> None:
    p, q = param(), param()
    optimizer = sgd(p, q)
    masters = plain_masters(optimizer, {id(p): torch.full((2,), FINE)})
    masters.adopt()
    master = masters.table.find(p)
    optimizer.param_groups[0]["params"] = [q]
    step(masters, optimizer)
    with torch.no_grad():
        p[0] = 5.0
    assert masters.table.find(p).read().tolist() == [5.0, FINE]
    optimizer.param_groups[0]["params"] = [q, p]
    masters.adopt()
    assert masters.table.find(p) is master


def test_a_resting_master_goes_with_its_parameter() -> None:
    p, q = param(), param()
    optimizer = sgd(p, q)
    masters = plain_masters(optimizer)
    masters.adopt()
    master = weakref.ref(masters.table.find(p).read())
    optimizer.param_groups[0]["params"] = [q]
    step(masters, optimizer)
    step(masters, optimizer)
    assert master() is not None
    del p
    gc.collect()
    assert master() is None
