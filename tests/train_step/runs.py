"""Batches and runs of ``TrainStep`` that the files of this folder share."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from halfstep import TrainStep, amp
from tests.support.worlds import loss_of

__all__ = ["random_batch", "run_of"]


def random_batch(
    i: int, rows: int = 4, *, x: tuple[int, ...] = (6,), y: tuple[int, ...] = (3,), overflow: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of batch ``i``, of these shapes; an overflow begins at the first input."""
    generator = torch.Generator().manual_seed(i)
    inputs, targets = (torch.randn(rows, *size, generator=generator) for size in (x, y))
    if overflow:
        inputs.view(-1)[0] = math.inf
    return inputs, targets


def run_of(
    model: nn.Module, level: str | None, dtype: Any, make: Any, scaled: bool, rule: Any = None, **options: Any
) -> tuple[Any, Any, TrainStep]:
    """Return the model, its optimizer and its step, brought up by ``amp.initialize``, by ``GradScaler``, or neither."""
    optimizer = make(model.parameters(), lr=1e-3)
    if level is not None:
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, dtype=dtype, loss_scale=rule, verbosity=0)
    scaler = amp.GradScaler(init_loss_scaling=2.0**10, decr_every_n_nan_or_inf=1) if scaled else None
    return model, optimizer, TrainStep(model, loss_of, optimizer, scaler=scaler, **options)
