"""What most trainings in the tests are made of: dtypes, and steps in the ways that a program may write them."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterable, Sequence
from inspect import signature
from typing import Any

import pytest
import torch
from torch import nn

from halfstep import amp

__all__ = [
    "BF16",
    "FP16",
    "FP32",
    "FP64",
    "HALVES",
    "LEVELS",
    "advance",
    "assert_equal",
    "close",
    "in_a_thread",
    "in_both_halves",
    "loss_of",
    "read_back",
    "scaled_backward",
    "scaled_step",
    "start_amp",
    "step_and_clear",
    "unscaled_step",
    "with_both_masters",
    "with_optimizer",
]

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
HALVES = [BF16, FP16]
LEVELS = ["O0", "O1", "O2", "O3"]

in_both_halves = pytest.mark.parametrize("half", HALVES, ids=["bf16", "fp16"])
with_both_masters = pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])


class Applies(nn.Module):
    """A function of a tensor as a module."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class Made(nn.Module):
    """A module of named parts, whose forward pass is a function of the module and its inputs."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.function(self, *inputs, **options)


def with_optimizer(model: Any, kind: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, Any]:
    """Pair a model with an optimizer of its parameters."""
    return model, kind(model.parameters(), *args, **options)


def start_amp(model: Any, kind: Callable[..., Any], level: Any, **settings: Any) -> tuple[Any, Any]:
    """Bring up a model and an optimizer of its parameters; what ``amp.initialize`` takes goes there, ``fused`` too."""
    of_amp = {name: settings.pop(name) for name in set(settings) & set(signature(amp.initialize).parameters)}
    return amp.initialize(*with_optimizer(model, kind, **settings), opt_level=level, verbosity=0, **of_amp)  # type: ignore[no-any-return]


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


def assert_equal(found: Iterable[Any], expected: Iterable[Any]) -> None:
    """Assert that tensors, or containers of tensors, are equal bit for bit, in order."""
    torch.testing.assert_close([*found], [*expected], rtol=0.0, atol=0.0)


def close(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], ulps: float = 8) -> None:
    """Assert that fp32 tensors differ by a few units in the last place, or by as little near zero."""
    torch.testing.assert_close(ours, theirs, rtol=ulps * 2**-23, atol=ulps * 2**-23)


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output.float(), target)


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
