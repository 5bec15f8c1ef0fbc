"""What most trainings in the tests are made of: dtypes, and steps in the ways that a program may write them."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from halfstep import amp

__all__ = [
    "BF16",
    "FP16",
    "FP32",
    "FP64",
    "advance",
    "in_a_thread",
    "read_back",
    "scaled_backward",
    "scaled_step",
    "step_and_clear",
    "unscaled_step",
    "with_optimizer",
]

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


class Applies(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def with_optimizer(model: Any, kind: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, Any]:
    """Pair a model with an optimizer of its parameters."""
    return model, kind(model.parameters(), *args, **options)


def scaled_backward(loss: torch.Tensor, optimizer: Any, *args: Any, by: Any = amp, **options: Any) -> None:
    """Run the backward pass of a loss in ``scale_loss`` of ``amp`` or of a handle."""
    with by.scale_loss(loss, optimizer, *args, **options) as scaled:
        scaled.backward()


def scaled_step(loss: torch.Tensor, optimizer: Any, scaler: Any = None, **options: Any) -> None:
    """Run a backward pass and a step, by ``amp.scale_loss`` or by a scaler."""
    if scaler is None:
        scaled_backward(loss, optimizer, **options)
        optimizer.step()
    else:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def advance(loss: torch.Tensor, optimizer: Any, scaler: Any = None, **options: Any) -> None:
    """``scaled_step``, and gradients are cleared."""
    scaled_step(loss, optimizer, scaler, **options)
    optimizer.zero_grad()


def unscaled_step(loss: torch.Tensor, optimizer: Any) -> None:
    """Run a whole step of a training without halfstep."""
    loss.backward()
    step_and_clear(optimizer)


def step_and_clear(optimizer: Any) -> None:
    optimizer.step()
    optimizer.zero_grad()


def read_back(state: Any, **options: Any) -> Any:
    """What ``torch.load`` gives of something that was saved: plain data, unless options say otherwise."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, **{"weights_only": True, **options})


def in_a_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
