"""A tool that has looked at a model keeps it in no cycle: an O1 session ends when the model goes, not later."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import halfstep
from halfstep import numerics
from halfstep.amp import debugging
from tests.support.worlds import BF16, scaled_step, start_amp

X, Y = torch.ones(4, 4), torch.tensor([0, 1, 0, 1])


def loss(model: nn.Module) -> torch.Tensor:
    return nn.functional.cross_entropy(model(X).float(), Y)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    scaled_step(loss(model), optimizer)


def monitor(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with numerics.Monitor(model, optimizer, every=1) as watched:
        step(model, optimizer)
    assert watched.rows()


def watch(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    halfstep.watch(optimizer)
    step(model, optimizer)


def operator_stats(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with debugging.collect_operator_stats():
        loss(model)


TOOLS: dict[str, Callable[[Any, Any], object]] = {
    "Monitor": monitor,
    "watch": watch,
    "check": lambda model, optimizer: halfstep.check(model, optimizer, batch=lambda: loss(model)),
    "op_table": lambda model, optimizer: numerics.op_table(lambda: loss(model).backward(), model),
    "compare_step": lambda model, optimizer: numerics.compare_step(
        lambda: loss(model), nn.Sequential(model), candidate="O1"
    ),
    "operator stats": operator_stats,
}


@pytest.mark.usefixtures("collector_off")
@pytest.mark.parametrize("tool", TOOLS)
def test_a_model_goes_with_its_last_reference(tool: str, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = start_amp(
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.optim.AdamW, "O1", dtype=BF16
    )
    TOOLS[tool](model, optimizer)
    reference = weakref.ref(model)
    del model, optimizer
    assert reference() is None
