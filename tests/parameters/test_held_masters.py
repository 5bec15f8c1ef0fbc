"""Masters that a user holds: what is written into them arrives, by whatever spelling, and they show what is stored."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from halfstep import TrainStep, amp, optimizers
from halfstep.core.errors import UsageError
from halfstep.kernels.launch import backend_for
from halfstep.parameters import held_masters
from halfstep.parameters.plain import Plain
from halfstep.parameters.split import InState
from tests.support.backends import skip_without_compiler
from tests.support.worlds import (
    BF16,
    advance,
    in_both_halves,
    scaled_backward,
    start_amp,
    with_both_masters,
)

FINE = 1.0 + 2.0**-20  # rounds to 1 in 16 bits
X = torch.linspace(-1.0, 1.0, 8).reshape(2, 4)


def start(half: torch.dtype = BF16, fused: bool = True, lr: float = 0.0) -> tuple[Any, Any]:
    return start_amp(nn.Linear(4, 3), torch.optim.SGD, "O2", dtype=half, fused=fused, loss_scale=1.0, lr=lr)


def step(model: Any, optimizer: Any) -> None:
    advance(model(X).float().sum(), optimizer)


def master_of(optimizer: Any) -> Any:
    return next(iter(amp.master_params(optimizer)))


def as_array(master: torch.Tensor) -> Any:
    return master.detach().cpu().numpy()


WAYS: dict[str, Callable[[Any], Any]] = {
    "fill_": lambda m: m.fill_(FINE),
    "copy_": lambda m: m.copy_(torch.full((3, 4), FINE)),
    "an index": lambda m: m.__setitem__(slice(None), FINE),
    "a view": lambda m: m.view(-1).__setitem__(slice(None), FINE),
    "a transpose": lambda m: m.t().fill_(FINE),
    "narrow": lambda m: [m.narrow(0, i, 1).fill_(FINE) for i in range(3)],
    "data": lambda m: m.data.fill_(FINE),
    "other memory": lambda m: setattr(m, "data", torch.full((3, 4), FINE)),
    "float64 memory": lambda m: setattr(m, "data", torch.full((3, 4), FINE, dtype=torch.float64)),
    "a detached one": lambda m: m.detach().fill_(FINE),
    "vector_to_parameters": lambda m: nn.utils.vector_to_parameters(torch.full((12,), FINE), [m]),
    "an array": lambda m: as_array(m).fill(FINE),
    "DLPack": lambda m: (
        np.from_dlpack(m.detach()).__setitem__(slice(None), FINE)
        if np.from_dlpack(m.detach()).flags.writeable
        else m.fill_(FINE)
    ),
    "foreach": lambda m: torch._foreach_copy_([m], [torch.full((3, 4), FINE)]),
    "out": lambda m: torch.add(torch.full((3, 4), FINE), 0.0, out=m),
    "its bits": lambda m: m.view(torch.int32).copy_(torch.full((3, 4), FINE).view(torch.int32)),
}


@in_both_halves
@with_both_masters
@pytest.mark.parametrize("way", WAYS)
def test_what_is_written_in_any_way_arrives(way: str, fused: bool, half: torch.dtype) -> None:
    model, optimizer = start(half, fused)
    with torch.no_grad():
        WAYS[way](master_of(optimizer))  # nobody holds it afterwards
    assert torch.equal(model.state_dict()["weight"], torch.full((3, 4), FINE))
    assert torch.equal(master_of(optimizer), torch.full((3, 4), FINE))
    assert torch.equal(model.weight, torch.ones(3, 4, dtype=half))
    step(model, optimizer)
    assert torch.equal(model.state_dict()["weight"], torch.full((3, 4), FINE))


DOORS: dict[str, Callable[[Any, Any], Any]] = {
    "a step": step,
    "a forward pass": lambda model, optimizer: model(X),
    "a forward pass in inference mode": lambda model, optimizer: torch.inference_mode()(model)(X),
    "master_params": lambda model, optimizer: list(amp.master_params(optimizer)),
    "master_model": lambda model, optimizer: amp.master_model(model),
    "state_dict": lambda model, optimizer: model.state_dict(),
    "the optimizer's state_dict": lambda model, optimizer: optimizer.state_dict(),
    "load_state_dict": lambda model, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    "a deep copy": lambda model, optimizer: copy.deepcopy(optimizer),
    "a pickle": lambda model, optimizer: pickle.dumps(optimizer),
    "TrainStep": lambda model, optimizer: TrainStep(model, nn.MSELoss(), optimizer)(X, torch.zeros(2, 3)),
}


@pytest.mark.every_combination  # some are skipped
@with_both_masters
@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("door", DOORS)
def test_what_is_written_reaches_the_weight_at_every_door(door: str, stepped: bool, fused: bool) -> None:
    if door == "the optimizer's state_dict" and not fused:
        pytest.skip("there are no masters in it")
    skip_without_compiler(needed=door == "the optimizer's state_dict")
    model, optimizer = start(fused=fused)
    if stepped:
        step(model, optimizer)
    expected = model.state_dict()["weight"].clone()
    expected[0, 0] = 5.0
    master = master_of(optimizer)
    master.detach()[0, 0] = 5.0
    DOORS[door](model, optimizer)
    assert torch.equal(model.weight, expected.to(BF16))
    assert torch.equal(master, expected)
    assert torch.equal(model.state_dict()["weight"], expected)


@in_both_halves
@with_both_masters
def test_a_held_one_shows_what_a_step_and_others_have_written(fused: bool, half: torch.dtype) -> None:
    model, optimizer = start(half, fused, lr=2.0**-20)
    master = master_of(optimizer)
    view, detached, array = master.view(-1), master.detach(), as_array(master)
    before = master.detach().clone()
    step(model, optimizer)
    now = model.state_dict()["weight"]
    assert not torch.equal(now, before)
    for held in (master, view.view(3, 4), detached, torch.from_numpy(array)):
        assert torch.equal(held, now)
    with torch.no_grad():
        model.weight[1] = 3.0
    assert master_of(optimizer) is master
    assert torch.equal(master.to(half), model.weight)
    assert torch.equal(master, model.state_dict()["weight"])
    model.load_state_dict({"weight": torch.full((3, 4), FINE), "bias": torch.zeros(3)})
    assert master_of(optimizer) is master
    assert torch.equal(master, torch.full((3, 4), FINE))
    assert torch.equal(detached, torch.full((3, 4), FINE))


@with_both_masters
@pytest.mark.parametrize("keep", [torch.Tensor.detach, lambda m: m.view(-1), as_array, lambda m: m.data])
def test_memory_that_is_held_without_the_parameter_is_the_master(keep: Any, fused: bool) -> None:
    model, optimizer = start(fused=fused)
    kept = keep(master_of(optimizer))
    gc.collect()
    for value in (5.0, 6.0):
        with torch.no_grad():
            kept[0] = value
        step(model, optimizer)
        assert model.state_dict()["weight"].view(-1)[0] == value
        assert master_of(optimizer).view(-1)[0] == value
        assert master_of(optimizer).requires_grad
    with torch.no_grad():
        master_of(optimizer).fill_(8.0)
    assert torch.as_tensor(kept).reshape(-1)[0] == 8.0


@with_both_masters
@pytest.mark.parametrize("stepped", [False, True])
def test_where_both_are_written_the_master_wins_and_elsewhere_the_weight(stepped: bool, fused: bool) -> None:
    model, optimizer = start(fused=fused)
    if stepped:
        step(model, optimizer)
    expected = model.state_dict()["weight"].clone()
    master = master_of(optimizer)
    assert torch.equal(master, expected)
    master.data[0] = FINE
    model.weight.data[0] = 3.0
    model.weight.data[1] = 4.0
    expected[0] = FINE
    found = model.state_dict()["weight"]
    assert torch.equal(found[[0, 2]], expected[[0, 2]])
    assert torch.equal(found[1].to(BF16), torch.full((4,), 4.0, dtype=BF16))
    assert torch.equal(model.weight[0], torch.ones(4, dtype=BF16))


@in_both_halves
@with_both_masters
@torch.no_grad()
def test_a_sign_of_zero_and_what_is_not_finite_arrive(fused: bool, half: torch.dtype) -> None:
    model, optimizer = start(half, fused)
    bias = list(amp.master_params(optimizer))[1]
    for values in ([0.0, -0.0, 1e30], [-0.0, 0.0, float("inf")], [float("nan"), 1.0, -float("inf")]):
        bias.copy_(torch.tensor(values))
        found = model.state_dict()["bias"]
        assert torch.equal(found.view(torch.int32), torch.tensor(values).view(torch.int32)) or values[0] != values[0]
        assert torch.equal(found.isnan(), torch.tensor(values).isnan())
        assert torch.equal(found.nan_to_num(7.0), torch.tensor(values).nan_to_num(7.0))


@with_both_masters
def test_clipping_reads_no_master(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = start(fused=fused)
    scaled_backward(model(X).float().sum(), optimizer)
    monkeypatch.setattr(held_masters, "find_master", lambda *_: pytest.fail("a master was read"))
    masters = list(amp.master_params(optimizer))
    norm = nn.utils.clip_grad_norm_(masters, 0.5)
    expected = sum(float(p.grad.float().square().sum()) for p in model.parameters()) ** 0.5
    assert float(norm) > 0.5
    assert expected == pytest.approx(0.5, rel=1e-3)
    nn.utils.clip_grad_value_(masters, 1e-3)
    assert max(float(p.grad.abs().max()) for p in model.parameters()) == pytest.approx(1e-3)


@with_both_masters
def test_nothing_is_kept_of_masters_that_nobody_holds(fused: bool) -> None:
    model, optimizer = start(fused=fused)
    print(list(amp.master_params(optimizer)))
    step(model, optimizer)
    assert not held_masters.MATERIALIZED
    held = list(amp.master_params(optimizer))
    assert [p.shape for p in held] == [p.shape for p in model.parameters()]
    step(model, optimizer)
    assert held_masters.MATERIALIZED
    del held
    step(model, optimizer)
    assert not held_masters.MATERIALIZED


@with_both_masters
def test_masters_keep_their_values_when_the_optimizer_is_gone(fused: bool) -> None:
    model, optimizer = start(fused=fused)
    with torch.no_grad():
        master_of(optimizer).fill_(FINE)
    read, unread = master_of(optimizer), amp.master_model(model)
    assert read.tolist() == [[FINE] * 4] * 3
    del optimizer
    gc.collect()
    assert not held_masters.MATERIALIZED, "it goes although a master is held"
    model(X)
    assert torch.equal(read, torch.full((3, 4), FINE))
    assert torch.equal(unread.weight, torch.full((3, 4), FINE))


@with_both_masters
def test_a_saved_forward_pass_of_the_masters_or_the_model_survives_a_read(fused: bool) -> None:
    model, optimizer = start(fused=fused)
    twin = amp.master_model(model)
    assert twin.weight.requires_grad
    loss, other = model(X).float().sum(), twin(X).sum()
    list(amp.master_params(optimizer))
    model.state_dict()
    (loss + other).backward()
    assert model.weight.grad is not None


def test_a_step_inside_of_the_backward_pass_is_not_taken_for_a_write() -> None:
    models: Any = [nn.Linear(4, 3) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    found = []
    for model, release in zip(models, (True, False), strict=True):
        model, optimizer = start_amp(model, optimizers.FusedSGD, "O2", dtype=BF16, loss_scale=1.0, lr=0.5)
        optimizer.attach(model, release=release)
        held = master_of(optimizer)
        with torch.no_grad():
            held[0] = FINE
        for _ in range(3):
            step(model, optimizer)
        assert torch.equal(held, model.state_dict()["weight"])
        found.append(held.detach().clone())
    assert torch.equal(*found)


def test_data_of_another_shape_is_refused() -> None:
    model, optimizer = start()
    master = master_of(optimizer)
    master.data = torch.zeros(2)
    with pytest.raises(UsageError, match=r"shape \(3, 4\) was given data of shape \(2,\)"):
        step(model, optimizer)
    step(model, optimizer)
    assert master_of(optimizer) is not master
    assert torch.equal(master_of(optimizer), model.state_dict()["weight"])


@with_both_masters
def test_an_error_while_a_master_is_settled_loses_no_write(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = start(fused=fused)
    master = master_of(optimizer)
    with torch.no_grad():
        master.fill_(FINE)

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(InState if fused and backend_for("cpu") == "compiled" else Plain, "read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(X)
    assert master_of(optimizer) is master
    assert torch.equal(model.state_dict()["weight"], torch.full((3, 4), FINE))


@with_both_masters
def test_a_weight_that_is_frozen_in_training_still_has_its_master(fused: bool) -> None:
    model, optimizer = start(fused=fused)
    step(model, optimizer)
    with torch.no_grad():
        master_of(optimizer).fill_(FINE)
    model.weight.requires_grad_(False)
    assert torch.equal(master_of(optimizer), torch.full((3, 4), FINE))
    assert master_of(optimizer).dtype is torch.float32


@with_both_masters
def test_it_prints_and_lies_in_memory_as_any_parameter(fused: bool) -> None:
    model, optimizer = start(fused=fused)
    value = nn.Parameter(model.state_dict()["weight"].clone())
    for use in (repr, str, torch.Tensor.tolist, lambda m: m.data_ptr() != 0, lambda m: m.untyped_storage().nbytes()):
        assert use(master_of(optimizer)) == use(value)
    twin = amp.master_model(model)
    assert repr(twin) == repr(nn.Linear(4, 3))
    assert {name: p.tolist() for name, p in twin.named_parameters()} == {
        name: p.tolist() for name, p in model.state_dict().items()
    }


@with_both_masters
def test_an_average_written_into_the_masters_is_evaluated_and_taken_back(fused: bool) -> None:
    model, optimizer = start(fused=fused, lr=0.1)
    average = torch.optim.swa_utils.AveragedModel(amp.master_model(model))
    twin = amp.master_model(model)
    for _ in range(3):
        step(model, optimizer)
        average.update_parameters(twin)
    saved = [p.detach().clone() for p in amp.master_params(optimizer)]
    with torch.no_grad():
        for master, mean in zip(amp.master_params(optimizer), average.module.parameters(), strict=True):
            master.data.copy_(mean)
        found = model(X)
        assert torch.equal(model.weight, average.module.weight.to(BF16))
        for master, value in zip(amp.master_params(optimizer), saved, strict=True):
            master.data.copy_(value)
        assert not torch.equal(model(X), found)
    assert torch.equal(model.state_dict()["weight"], saved[0])


def test_an_optimizer_that_goes_on_unfused_keeps_the_masters_that_are_held() -> None:
    model: Any = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 2))
    model, optimizer = start_amp(model, torch.optim.SGD, "O2", dtype=BF16, loss_scale=1.0, lr=0.5)
    table = master_of(optimizer)
    with torch.no_grad():
        table.fill_(FINE)
    for _ in range(2):
        advance(model(torch.arange(4)).float().sum(), optimizer)
    assert master_of(optimizer) is table
    assert torch.equal(table, model.state_dict()["0.weight"])
    assert table[-1].tolist() == [FINE] * 4
    assert table[0].tolist() != [FINE] * 4


class ReadsMasters(optimizers.FusedSGD):
    """Looks at its masters inside of its own step, and keeps the first."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        self.held = master_of(self)
        assert self.held.sum().isfinite()
        return super().step(*args, **kwargs)


def test_a_master_that_the_step_itself_reads_shows_what_the_step_has_written() -> None:
    model, optimizer = start_amp(nn.Linear(4, 3), ReadsMasters, "O2", dtype="bfloat16", lr=0.1)
    step(model, optimizer)
    shown = optimizer.held.detach().clone()
    assert torch.equal(shown, master_of(optimizer))
    assert torch.equal(shown.bfloat16(), model.weight)


@with_both_masters
def test_while_steps_are_recorded_nothing_is_settled(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written while a CUDA graph of steps is recorded would become a part of every step."""
    model, optimizer = start(fused=fused)
    master = master_of(optimizer)
    master.detach().fill_(2.0)
    with monkeypatch.context() as recording:
        recording.setattr(held_masters, "capturing", lambda device: True)
        held_masters.sync_held_masters()
        assert not (model.weight == 2.0).any()
    held_masters.sync_held_masters()
    assert (model.weight == 2.0).all()
