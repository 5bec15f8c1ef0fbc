"""Masters are in one checkpoint or the other: in that of the model if it saves fp32, else in that of the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from halfstep import amp
from tests.support.worlds import advance, assert_equal, read_back, with_optimizer

from ..support.backends import needs_compiler

Prepared = tuple[nn.Module, torch.optim.Optimizer]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "NAdam": lambda params: torch.optim.NAdam(params, lr=1e-3),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3),
}


def decorated(
    model: nn.Module, optimizer: torch.optim.Optimizer, dtype: str, save_dtype: str | None = None, fused: bool = True
) -> None:
    amp.decorate(model, optimizer, level="O2", dtype=dtype, save_dtype=save_dtype or dtype, fused=fused)


def given(model: nn.Module, optimizer: torch.optim.Optimizer, dtype: str) -> None:
    model.to(getattr(torch, dtype))
    amp.give_masters(optimizer)


WAYS: dict[str, Callable[[nn.Module, torch.optim.Optimizer, str], None]] = {
    "save_dtype=float32": partial(decorated, save_dtype="float32"),
    "save_dtype of the weights": decorated,
    "give_masters": given,
}


def make(optimizer: str, way: str, dtype: str) -> Prepared:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    chosen = OPTIMIZERS[optimizer](model.parameters())
    WAYS[way](model, chosen, dtype)
    return model, chosen


def train(prepared: Prepared, dtype: str, seed: int, steps: int = 5) -> None:
    model, optimizer = prepared
    generator = torch.Generator().manual_seed(seed)
    scaler = amp.GradScaler(enable=dtype == "float16", init_loss_scaling=128.0)
    for _ in range(steps):
        x = torch.randn(8, 16, generator=generator).to(getattr(torch, dtype))
        advance(model(x).float().square().mean(), optimizer, scaler)


def masters(prepared: Prepared) -> list[torch.Tensor]:
    return [master.detach().clone() for master in amp.master_params(prepared[1])]


@pytest.mark.parametrize("first", ["model", "optimizer"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_run_has_the_masters_of_one_that_went_on(optimizer: str, way: str, dtype: str, first: str) -> None:
    whole, resumed = make(optimizer, way, dtype), make(optimizer, way, dtype)
    train(whole, dtype, seed=1)
    saved = [read_back(part.state_dict()) for part in whole]
    train(whole, dtype, seed=2)
    for i in (0, 1) if first == "model" else (1, 0):
        resumed[i].load_state_dict(saved[i])
    train(resumed, dtype, seed=2)
    for mine, other in zip(masters(resumed), masters(whole), strict=True):
        assert mine.dtype is torch.float32
        assert torch.equal(mine, other)


def test_an_optimizer_has_the_keys_of_torch_s_where_the_model_saves_the_masters() -> None:
    prepared = make("NAdam", "save_dtype=float32", "bfloat16")
    train(prepared, "bfloat16", seed=1)
    assert set(prepared[1].state_dict()["state"][0]) == {"step", "mu_product", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("loads", ["plain", pytest.param("fused", marks=needs_compiler)])
def test_masters_go_from_a_fused_optimizer_to_a_plain_one_and_back(loads: str) -> None:
    def prepared(fused: bool) -> Prepared:
        torch.manual_seed(0)
        model, optimizer = with_optimizer(nn.Linear(16, 32), torch.optim.AdamW, lr=1e-3)
        decorated(model, optimizer, "bfloat16", fused=fused)
        return model, optimizer

    source, target = prepared(loads == "plain"), prepared(loads == "fused")
    train(source, "bfloat16", seed=1)
    for part, state in zip(target, [part.state_dict() for part in source], strict=True):
        part.load_state_dict(read_back(state))
    assert_equal(masters(target), masters(source))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_state_from_before_the_first_step_loads(optimizer: str) -> None:
    """torch's Adam asks the state of the first parameter for its step count when it loads."""
    whole, resumed = (make(optimizer, "give_masters", "bfloat16") for _ in range(2))
    for i in (0, 1):
        resumed[i].load_state_dict(read_back(whole[i].state_dict()))
    for prepared in (whole, resumed):
        train(prepared, "bfloat16", seed=1)
    assert_equal(masters(resumed), masters(whole))
