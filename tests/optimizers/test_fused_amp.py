"""Fused optimizers under ``amp``: they keep their masters themselves, and step on what O2 leaves them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from halfstep import amp, optimizers
from halfstep.core.errors import UsageError
from halfstep.kernels import backend_for
from halfstep.kernels.storage import join
from tests.support.backends import needs_compiler
from tests.support.worlds import BF16, HALVES, assert_equal, scaled_backward, step_and_clear

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


def test_stochastic_rounding_stays_without_masters() -> None:
    model, optim = make(BF16, lambda p, **k: optimizers.FusedAdam(p, rounding="stochastic", **k))
    backward(model, optim)
    optim.step()
    assert "remainder" not in optim.state[model[0].weight]


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
