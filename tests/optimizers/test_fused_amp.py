"""Fused optimizers under ``amp``: they keep their masters themselves, and step on what O2 leaves them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from halfstep import amp, optimizers
from halfstep.core.errors import ArgumentTypeError, ArgumentValueError, UsageError
from halfstep.kernels import backend_for
from halfstep.kernels.storage import join
from tests.support.backends import needs_compiler
from tests.support.worlds import BF16, FP16, HALVES, assert_equal, read_back, scaled_backward, step_and_clear

X = torch.linspace(-1, 1, 24).view(4, 6)


def make(dtype: torch.dtype | None, optimizer: Callable[..., Any], **arguments: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    optim = optimizer(model.parameters(), lr=0.01, weight_decay=0.1)
    if dtype is None:
        return model, optim
    return amp.initialize(model, optim, opt_level="O2", dtype=dtype, verbosity=0, **arguments)


def backward(model: nn.Module, optim: Any, x: torch.Tensor = X, factor: float = 1.0, **arguments: Any) -> None:
    scaled_backward(model(x).square().mean() * factor, optim, **arguments)


def masters(optim: Any) -> list[torch.Tensor]:
    """The fp32 value behind each parameter, whoever keeps it."""
    return [param.detach().clone() for param in amp.master_params(optim)]


@pytest.mark.parametrize("dtype", HALVES)
def test_masters_are_the_optimizers_own(dtype: torch.dtype) -> None:
    model, optim = make(dtype, optimizers.FusedAdam)
    assert list(map(id, optim.param_groups[0]["params"])) == list(map(id, model.parameters()))
    backward(model, optim)
    optim.step()
    kept = "remainder" if dtype is BF16 and backend_for("cpu") != "torch" else "master"
    assert [kept in optim.state[p] for p in model.parameters()] == [p.dtype is dtype for p in model.parameters()]
    for param, master in zip(model.parameters(), amp.master_params(optim), strict=True):
        state, master = optim.state[param], master.detach()
        assert torch.equal(
            master, join(param, state["remainder"]) if "remainder" in state else state.get("master", param)
        )


@pytest.mark.parametrize("loss_scale", [None, 1.0, 128.0, "dynamic"])
@pytest.mark.parametrize("dtype", HALVES)
def test_trains_as_plain_masters_do(dtype: torch.dtype, loss_scale: Any) -> None:
    # No Adam: it makes a step of lr from the rounding error of a gradient that is zero but for it.
    runs = [make(dtype, cls, loss_scale=loss_scale) for cls in (optimizers.FusedSGD, torch.optim.SGD)]
    for _ in range(20):
        for model, optim in runs:
            backward(model, optim)
            step_and_clear(optim)
    for ours, theirs in zip(*(masters(optim) for _, optim in runs), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("dtype", HALVES)
def test_an_overflow_changes_nothing(dtype: torch.dtype, bad: float) -> None:
    model, optim = make(dtype, optimizers.FusedAdam, loss_scale="dynamic")
    for factor in (1.0, bad, 1.0):
        before = copy.deepcopy([list(model.parameters()), optim.state_dict()["state"]])
        scale = amp.state_dict()["loss_scaler0"]["loss_scale"]
        backward(model, optim, factor=factor)
        step_and_clear(optim)
        leaves = [
            torch.utils._pytree.tree_leaves(x)
            for x in (before, [list(model.parameters()), optim.state_dict()["state"]])
        ]
        if factor != 1.0:
            assert all(torch.equal(a, b) for a, b in zip(*leaves, strict=True))
            assert amp.state_dict()["loss_scaler0"]["loss_scale"] == scale / 2
    assert amp.steps_skipped(optim) == 1


def test_a_pass_that_fails_puts_gradients_back() -> None:
    model, optim = make(FP16, optimizers.FusedAdam, loss_scale=128.0)
    backward(model, optim)
    before = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(ZeroDivisionError):
        backward(model, optim, factor=1 / 0)

    def fail() -> None:
        with amp.scale_loss(model(X).sum(), optim) as scaled:
            scaled.backward()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("dtype", HALVES)
def test_resuming_is_exact(dtype: torch.dtype) -> None:
    model, optim = make(dtype, optimizers.FusedAdam)
    for _ in range(3):
        backward(model, optim)
        step_and_clear(optim)
    scales = amp.state_dict(optimizer=optim)
    saved = read_back({"model": model.state_dict(), "optim": optim.state_dict(), "amp": scales})
    again, other = make(dtype, optimizers.FusedAdam)
    again.load_state_dict(saved["model"])
    other.load_state_dict(saved["optim"])
    amp.load_state_dict(saved["amp"])
    for m, o in ((model, optim), (again, other)):
        for _ in range(3):
            backward(m, o)
            step_and_clear(o)
    assert all(torch.equal(a, b) for a, b in zip(masters(optim), masters(other), strict=True))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "optimizer",
    [optimizers.FusedAdam, optimizers.FusedSGD, optimizers.FusedLAMB, torch.optim.AdamW, torch.optim.SGD],
    ids=["FusedAdam", "FusedSGD", "FusedLAMB", "AdamW", "SGD"],
)
def test_weights_that_were_float64_have_fp32_masters(optimizer: Any, dtype: torch.dtype) -> None:
    """Weights from numpy, or of ``model.double()``, train to the bit as their fp32 values do, resumed or not."""

    def made(double: bool) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
        optim = optimizer((model.double() if double else model).parameters(), lr=0.01)
        return amp.initialize(model, optim, opt_level="O2", dtype=dtype, verbosity=0)

    def train(model: nn.Module, optim: Any) -> None:
        for _ in range(3):
            backward(model, optim)
            step_and_clear(optim)

    single, half_way, resumed = made(False), made(True), made(True)
    assert all(torch.equal(a, b) for a, b in zip(masters(single[1]), masters(half_way[1]), strict=True))
    train(*half_way)
    kept = [value for state in half_way[1].state.values() for value in state.values()]
    assert not [value for value in kept if isinstance(value, torch.Tensor) and value.dtype is torch.float64]
    for ours, saved in zip(resumed, half_way, strict=True):
        ours.load_state_dict(copy.deepcopy(saved.state_dict()))
    train(*resumed)
    for _ in range(2):
        train(*single)
    assert all(torch.equal(a, b) for a, b in zip(masters(single[1]), masters(resumed[1]), strict=True))


@pytest.mark.parametrize("order", [("model", "optim"), ("optim", "model")], ids=" first, ".join)
@pytest.mark.parametrize(("dtype", "form"), [(BF16, "split"), (BF16, "plain"), (FP16, "plain")])
def test_resuming_is_exact_where_masters_are_half_way_between_two_weights(
    dtype: torch.dtype, form: Any, order: tuple[str, str]
) -> None:
    """There the two ways to round differ: a master that is split is rounded away from zero."""
    half_ulp = torch.finfo(dtype).eps / 2
    ties = torch.tensor([[1 + half_ulp, 1 + 3 * half_ulp, -1 - half_ulp, 0.125 + 0.125 * half_ulp]])

    def made() -> tuple[nn.Module, Any]:
        model = nn.Linear(4, 1, bias=False)
        with torch.no_grad():
            model.weight.copy_(ties)
        optim = optimizers.FusedAdam(model.parameters(), lr=0.0, master_weights=form)
        return amp.initialize(model, optim, opt_level="O2", dtype=dtype, verbosity=0)

    model, optim = made()
    backward(model, optim, torch.ones(2, 4))
    optim.step()
    saved = {"model": copy.deepcopy(model.state_dict()), "optim": copy.deepcopy(optim.state_dict())}
    assert torch.equal(saved["model"]["weight"], ties)
    again, other = made()
    for name in order:
        {"model": again, "optim": other}[name].load_state_dict(saved[name])
    for _ in range(2):
        assert torch.equal(again.weight, model.weight)
        assert torch.equal(again.state_dict()["weight"], ties)
        backward(again, other, torch.ones(2, 4))
        other.step()


@pytest.mark.parametrize("dtype", HALVES)
def test_decorate_and_grad_scaler(dtype: torch.dtype) -> None:
    model, optim = make(None, optimizers.FusedAdam)
    model, optim = amp.decorate(model, optim, level="O2", dtype=dtype)
    scaler, losses = amp.GradScaler(init_loss_scaling=1024), []
    for _ in range(10):
        with amp.auto_cast(level="O2", dtype=dtype):
            loss = model(X).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optim)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert scaler.step(optim)
        scaler.update()
        optim.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_stochastic_rounding_stays_without_masters() -> None:
    model, optim = make(BF16, lambda p, **k: optimizers.FusedAdam(p, rounding="stochastic", **k))
    backward(model, optim)
    optim.step()
    assert "remainder" not in optim.state[model[0].weight]


# ---- fuse

TORCH = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, dampening=0.1, weight_decay=0.1),
    "plain SGD": lambda p: torch.optim.SGD(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, lr_decay=0.1),
}


@pytest.mark.parametrize("name", TORCH)
def test_fused_in_place_and_in_the_middle_of_training(name: str) -> None:
    runs = []
    for fused in (False, True):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(5))]
        optim = TORCH[name](params)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optim, 0.9)
        for step in range(6):
            if fused and step == 3:
                assert optimizers.fuse(optim) is optim
                assert isinstance(optim, optimizers.FusedAdam | optimizers.FusedSGD | optimizers.FusedAdagrad)
            for p in params:
                p.grad = torch.randn(p.shape)
            optim.step()
            scheduler.step()
        runs.append(params)
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


def test_fused_then_initialized() -> None:
    model, optim = make(None, torch.optim.AdamW)
    optimizers.fuse(optim)
    model, optim = amp.initialize(model, optim, opt_level="O2", dtype=BF16, verbosity=0)
    backward(model, optim)
    optim.step()
    assert {"remainder", "master"} & optim.state[model[0].weight].keys()


@needs_compiler
def test_what_cannot_be_fused() -> None:
    params = [nn.Parameter(torch.ones(1))]
    with pytest.raises(ArgumentTypeError, match=r"torch\.optim\.Adam, .*not RMSprop"):
        optimizers.fuse(torch.optim.RMSprop(params))
    with pytest.raises(ArgumentValueError, match="differentiable"):
        optimizers.fuse(torch.optim.Adam(params, differentiable=True))
    _, optim = make(BF16, torch.optim.AdamW)
    with pytest.raises(ArgumentTypeError, match="fused already"):
        optimizers.fuse(optim)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kept", ["in the model", pytest.param("split", marks=needs_compiler), "8bit"])
def test_a_flattened_state_dict_of_torch_loads_or_is_refused(kept: str) -> None:
    """torch reads one by the names in the optimizer's state, and gives {} for those that it has not."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    options = StateDictOptions(flatten_optimizer_state_dict=True)

    def make(steps: int) -> tuple[nn.Module, optimizers.FusedAdam]:
        torch.manual_seed(0)
        model = nn.Linear(64, 128, dtype=BF16 if kept == "split" else None)
        arguments: Any = {"split": {"master_weights": True}, "8bit": {"state_dtype": "8bit"}}.get(kept, {})
        optimizer = optimizers.FusedAdam(model.parameters(), lr=0.01, **arguments)
        if kept == "in the model":
            amp.initialize(model, optimizer, opt_level="O2", dtype=BF16, verbosity=0)
        step(model, optimizer, steps)
        return model, optimizer

    def step(model: nn.Module, optimizer: optimizers.FusedAdam, steps: int) -> None:
        for _ in range(steps):
            for param in model.parameters():
                param.grad = torch.linspace(-1, 1, param.numel(), dtype=param.grad_dtype).view_as(param)
            step_and_clear(optimizer)

    saved, other = make(2), make(1)
    weights, state = get_state_dict(*saved, options=options)
    refused = (
        nullcontext() if kept == "in the model" else pytest.raises(UsageError, match="flattened state dict has no")
    )
    with refused:
        set_state_dict(*other, model_state_dict=weights, optim_state_dict=state, options=options)
    if kept == "in the model":
        step(*saved, 2)
        step(*other, 2)
        assert_equal(amp.master_params(saved[1]), amp.master_params(other[1]))
