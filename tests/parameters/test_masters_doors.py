"""Masters and gradients as others reach them: views, averages, checkpoints of other optimizers, state that is moved."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from halfstep import amp
from halfstep.core.errors import UsageError
from halfstep.optimizers.fuse import FusedTorchOptimizer, fuse
from tests.support.backends import skip_without_compiler
from tests.support.worlds import (
    BF16,
    in_both_halves,
    scaled_backward,
    scaled_step,
    start_amp,
    step_and_clear,
    with_both_masters,
    with_optimizer,
)

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))


def start(
    half: torch.dtype = BF16,
    fused: bool = True,
    make: Callable[..., Any] = lambda p: torch.optim.SGD(p, lr=0.1),
    model: nn.Module | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Linear(8, 4) if model is None else model
    return start_amp(model, make, **{"level": "O2", "dtype": half, "fused": fused, "loss_scale": 128.0, **options})


def backward(model: Any, optimizer: Any, factor: float = 1.0) -> None:
    scaled_backward(model(X).float().square().mean() * factor, optimizer)


def step(model: Any, optimizer: Any) -> None:
    backward(model, optimizer)
    step_and_clear(optimizer)


@in_both_halves
@with_both_masters
def test_the_state_of_an_optimizer_without_masters_leaves_them_alone(fused: bool, half: torch.dtype) -> None:
    plain, adam = with_optimizer(nn.Linear(8, 4), torch.optim.AdamW)
    plain(X).sum().backward()
    adam.step()
    weights, state = copy.deepcopy(plain.state_dict()), copy.deepcopy(adam.state_dict())
    model, optimizer = start(half, fused, torch.optim.AdamW)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    assert torch.equal(model.state_dict()["weight"], weights["weight"])
    optimizer.param_groups[0]["lr"] = 0.0
    step(model, optimizer)
    assert torch.equal(model.state_dict()["weight"], weights["weight"])
    fresh, own = start(half, fused, torch.optim.AdamW)
    before = fresh.state_dict()["weight"].clone()
    own.load_state_dict(own.state_dict())
    assert torch.equal(fresh.state_dict()["weight"], before)


@in_both_halves
@with_both_masters
def test_a_parameter_that_comes_later_has_the_value_it_has(fused: bool, half: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4))
    model, optimizer = start(half, fused, lambda _: torch.optim.SGD(model[1].parameters(), lr=0.1), model)
    model.load_state_dict({k: torch.full_like(v, 0.5) for k, v in model.state_dict().items()})
    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.0})
    step(model, optimizer)
    assert model[0].weight[0, 0].item() == model.state_dict()["0.weight"][0, 0].item() == 0.5


@with_both_masters
@pytest.mark.parametrize("make", [torch.optim.RMSprop, torch.optim.AdamW], ids=["RMSprop", "AdamW"])
def test_state_can_be_moved_to_a_parameter_in_the_place_of_another(make: Any, fused: bool) -> None:
    model, optimizer = start(BF16, fused, make, nn.Linear(8, 4, bias=False))
    for _ in range(3):
        step(model, optimizer)
    old = model.weight
    model.weight = new = nn.Parameter(old.detach().clone())
    optimizer.state[new] = optimizer.state.pop(old)
    optimizer.param_groups[0]["params"][0] = new
    step(model, optimizer)
    assert float(optimizer.state[new]["step"]) == 4.0
    assert old not in optimizer.state
    assert list(optimizer.state_dict()["state"]) == [0]


@in_both_halves
@with_both_masters
def test_optimizers_that_share_a_parameter_share_its_master(fused: bool, half: torch.dtype) -> None:
    model: Any = nn.Linear(8, 4, bias=False)
    before = model.weight.detach().clone()
    both: Any = [torch.optim.SGD(model.parameters(), lr=1e-5) for _ in range(2)]
    model, both = amp.initialize(model, both, opt_level="O2", dtype=half, loss_scale=128, fused=fused, verbosity=0)
    first, second = (next(iter(amp.master_params(optimizer))) for optimizer in both)
    assert first is second
    for _ in range(50):
        scaled_backward(model(X).float().sum(), both)
        for optimizer in both:
            optimizer.step()
        for optimizer in both:
            optimizer.zero_grad()
    moved = model.state_dict()["weight"] - before
    expected = -1e-3 * X.sum(0).expand(4, 8)
    assert float((moved - expected).norm()) < 0.01 * float(expected.norm())


def test_masters_outlive_the_first_of_two_optimizers() -> None:
    model: Any = nn.Linear(8, 4)
    before = model.weight.detach().clone()
    first, second = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adam(model.parameters(), lr=1e-4)
    amp.initialize(model, [first, second], opt_level="O2", dtype=BF16, verbosity=0)
    del first
    gc.collect()
    assert torch.equal(model.state_dict()["weight"], before)
    assert torch.equal(next(iter(amp.master_params(second))), before)


def frozen_first(model: Any) -> Any:
    model[0].requires_grad_(False)
    return model


FORWARDS: dict[str, Callable[[Any], torch.Tensor]] = {
    "the first weight is frozen": lambda model: frozen_first(model)(X),
    "a part is called": lambda model: model[1](model[0](X.to(model[0].weight.dtype))),
    "compiled": lambda model: torch.compile(model, backend="eager")(X),
}


@in_both_halves
@with_both_masters
@pytest.mark.parametrize(
    "forward", [pytest.param(name, marks=[pytest.mark.exhaustive] * (name == "compiled")) for name in FORWARDS]
)
def test_torch_s_scaler_meets_fp32_gradients_in_the_first_batch(forward: str, fused: bool, half: torch.dtype) -> None:
    model, optimizer = start(half, fused, model=nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    before = model.state_dict()["1.weight"].clone()
    scaler.scale(FORWARDS[forward](model).float().sum()).backward()
    assert {p.grad.dtype for p in model[1].parameters()} == {torch.float32}
    scaler.step(optimizer)
    assert not torch.equal(model.state_dict()["1.weight"], before)


@in_both_halves
@pytest.mark.parametrize("face", ["scale_loss", "GradScaler", "torch's GradScaler"])
def test_a_first_sparse_gradient_that_overflows_changes_nothing(face: str, half: torch.dtype) -> None:
    """The fused step finds out late that it cannot take it: after the loss scale has been looked at."""
    skip_without_compiler(face == "torch's GradScaler")
    results = []
    for fused in (True, False):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Embedding(8, 8, sparse=True), nn.Flatten(), nn.Linear(32, 4))
        model, optimizer = start(half, fused, model=model)
        options = {"init_scale": 64.0}
        told = fused or face != "torch's GradScaler"  # which calls no step where it knows of an overflow
        scaler: Any = amp.GradScaler(**options) if face == "GradScaler" else torch.amp.GradScaler("cpu", **options)
        for factor in (float("inf"), 1.0, 1.0):
            before = {name: value.clone() for name, value in model.state_dict().items()}
            loss = model(torch.arange(16).view(4, 4) % 8).float().sum() * factor
            scaled_step(loss, optimizer, None if face == "scale_loss" else scaler)
            if told:
                assert bool(optimizer.step_was_skipped) is (factor != 1.0)
            for name, value in model.state_dict().items():
                assert torch.equal(value, before[name]) is (factor != 1.0)
            optimizer.zero_grad()
        assert int(amp.steps_skipped(optimizer)) == int(told)
        results.append(model.state_dict()["0.weight"])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("beside", ["a step of its own", "a scheduler", "a closure"])
def test_an_optimizer_that_goes_on_unfused_keeps_what_is_on_it(beside: str) -> None:
    calls: list[str] = []

    def make(params: Any) -> Any:
        optimizer: Any = fuse(torch.optim.SGD(params, lr=0.1))
        own = optimizer.step
        if beside != "a scheduler":
            optimizer.step = lambda *args, **options: calls.append("step") or own(*args, **options)
        return optimizer

    def closure() -> torch.Tensor:
        scaled_backward(loss := model(torch.arange(4)).float().square().sum(), optimizer)
        return loss

    model, optimizer = start(BF16, True, make, nn.Sequential(nn.Embedding(8, 8, sparse=True), nn.Linear(8, 4)))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1) if beside == "a scheduler" else None
    assert isinstance(optimizer, FusedTorchOptimizer)
    for _ in range(3):
        before = model.state_dict()["0.weight"].clone()
        if beside == "a closure":
            assert optimizer.step(closure) > 0
        else:
            closure()
            optimizer.step()
        optimizer.zero_grad()
        assert not torch.equal(model.state_dict()["0.weight"], before)
        assert not isinstance(optimizer, FusedTorchOptimizer)
        if scheduler is not None:
            scheduler.step()  # warns if no step was counted
    assert len(calls) >= 3 if scheduler is None else optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)


@pytest.mark.parametrize("level", ["O2", "O3"])
@in_both_halves
def test_what_is_written_into_a_state_dict_of_copies_reaches_no_weight(half: torch.dtype, level: str) -> None:
    skip_without_compiler(level == "O2")
    model, optimizer = start(half, level=level)
    before = model.state_dict()["weight"].clone()
    model.state_dict()["weight"].fill_(0.25)
    assert torch.equal(model.state_dict()["weight"], before)
    step(model, optimizer)
    torch.testing.assert_close(model.state_dict()["weight"], before, rtol=0.0, atol=0.1)


@pytest.mark.exhaustive
@in_both_halves
@with_both_masters
def test_gradients_are_16_bit_again_when_the_optimizer_is_gone(fused: bool, half: torch.dtype) -> None:
    model, optimizer = start(half, fused)
    step(model, optimizer)
    del optimizer
    gc.collect()
    other = torch.optim.AdamW(model.parameters())
    model(X).float().square().mean().backward()
    assert {p.grad.dtype for p in model.parameters()} == {half}
    other.step()


def test_a_filter_that_raises_leaves_the_gradients() -> None:
    model, optimizer = with_optimizer(nn.Linear(8, 4), torch.optim.SGD, lr=0.1)
    model(X).sum().backward()
    before = model.weight.grad.clone()

    def refuse(module: nn.Module, name: str) -> None:
        raise KeyError(name)

    with pytest.raises(KeyError):
        amp.initialize(model, optimizer, opt_level="O2", dtype=BF16, module_filter=refuse, verbosity=0)
    assert model.weight.dtype is torch.float32
    assert torch.equal(model.weight.grad, before)


def test_weights_of_an_optimizer_that_amp_does_not_know_keep_16_bit_gradients() -> None:
    model: Any = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4))
    model, _ = start(BF16, True, lambda _: torch.optim.SGD(model[1].parameters(), lr=0.1), model)
    other = torch.optim.AdamW(model[0].parameters())
    model(X).float().square().mean().backward()
    assert {p.grad.dtype for p in model[0].parameters()} == {BF16}
    other.step()


def test_a_block_that_cannot_open_for_one_optimizer_leaves_the_others_as_they_were() -> None:
    models: Any = [nn.Linear(8, 4), nn.Linear(8, 4)]
    both: Any = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    models, both = amp.initialize(models, both, opt_level="O2", dtype=BF16, loss_scale=128.0, verbosity=0)

    def loss() -> torch.Tensor:
        return sum(model(X).float().sum() for model in models)  # type: ignore[return-value]

    scaled_backward(loss(), both)
    before = [p.grad.clone() for model in models for p in model.parameters()]
    with amp.scale_loss(models[1](X).float().sum(), both[1]) as scaled_loss:
        with pytest.raises(UsageError, match="is already open"), amp.scale_loss(loss(), both):
            pytest.fail("the block was opened")
        scaled_loss.backward()
    found = [p.grad for model in models for p in model.parameters()]
    factors = (1.0, 1.0, 2.0, 2.0)  # the open block of the second goes on
    assert all(torch.equal(g, b * factor) for g, b, factor in zip(found, before, factors, strict=True))
    with amp.scale_loss(loss(), both) as scaled_loss:  # no block of the first is open
        scaled_loss.backward()
    assert torch.equal(models[0].weight.grad, 2 * before[0])


def test_a_block_without_gradients_is_closed_for_all_its_optimizers() -> None:
    models: Any = [nn.Linear(8, 4), nn.Linear(8, 4)]
    both: Any = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    models, both = amp.initialize(models, both, opt_level="O2", dtype=BF16, loss_scale=128.0, verbosity=0)
    for model in models:
        model.weight, model.bias = (
            nn.Parameter(model.weight.detach().clone()),
            nn.Parameter(model.bias.detach().clone()),
        )
    loss = sum(model(X).float().sum() for model in models)
    scaled_backward(loss, both)
    for optimizer in both:  # no block is open any more, and what is wrong is another thing
        with pytest.raises(UsageError, match="fully_shard"):
            optimizer.step()


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize(
    "replace",
    [
        lambda m, weights: m.to_empty(device="cpu").load_state_dict(weights),
        lambda m, weights: m.load_state_dict(weights, assign=True),
    ],
    ids=["to_empty", "assign"],
)
def test_what_has_replaced_the_meta_parameters_of_an_optimizer_is_named(
    level: str, optimizer_class: Any, replace: Any
) -> None:
    weights = {name: value.clone() for name, value in nn.Linear(8, 4).state_dict().items()}
    with torch.device("meta"):
        model: Any = nn.Linear(8, 4)
    optimizer = optimizer_class(model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, dtype=BF16, verbosity=0)
    replace(model, weights)

    def batch() -> None:
        scaled_step(model(X).float().sum(), optimizer)

    with pytest.raises(UsageError, match=r"load_state_dict\(assign=True\)"):
        batch()
