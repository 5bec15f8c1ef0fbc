"""Faults that are put into a module of a model: what real models suffered from, in the smallest form."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from halfstep import amp
from tests.numerics.models import MODELS, Trial

__all__ = ["KINDS", "Fault", "draw"]


def overflow(y: torch.Tensor, half: torch.dtype, trial: Trial) -> torch.Tensor:
    """A factor that is divided out again, too late."""
    root = (4.0 * 65504.0 / float(y.detach().float().abs().amax())) ** 0.5  # which float16 has
    return y * root * root / root / root


def cancellation(y: torch.Tensor, half: torch.dtype, trial: Trial) -> torch.Tensor:
    """The difference of two numbers that are large and nearly equal."""
    large = 300.0 * float(y.detach().float().abs().amax())
    return (y + large) - large


class Small(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2.0**-15 * 2.0**-15 * 2.0**15 * 2.0**15  # numbers that float16 has


def flushed(y: torch.Tensor, half: torch.dtype, trial: Trial) -> torch.Tensor:
    """Gradients that are below the smallest number for a moment."""
    return Small.apply(y)


@torch.library.custom_op("halfstep_test::rounding_kernel", mutates_args=())
def rounding_kernel(y: torch.Tensor) -> torch.Tensor:
    """A kernel that takes and gives fp32, and rounds inside."""
    return (y * 1.1).bfloat16().float()


rounding_kernel.register_autograd(lambda ctx, grad: grad * 1.1)


def rounded(y: torch.Tensor, half: torch.dtype, trial: Trial) -> torch.Tensor:
    """A result that was rounded before it was cast to fp32."""
    return (y.float() * 1.1).to(half).float()


def rounded_in_a_kernel(y: torch.Tensor, half: torch.dtype, trial: Trial) -> torch.Tensor:
    """The same, where no op of torch shows it."""
    return rounding_kernel(y.float() * 1.1)


def loss(y: torch.Tensor, half: torch.dtype, trial: Trial) -> torch.Tensor:
    """A loss of its own in 16 bits."""
    with amp.disable_casts():
        trial.extra.append(F.mse_loss(y.to(half), torch.ones_like(y, dtype=half)).float())
    return y


KINDS: dict[str, list[Callable[[torch.Tensor, torch.dtype, Trial], torch.Tensor]]] = {
    "overflow": [overflow],
    "cancellation": [cancellation],
    "underflow": [flushed],
    "fp32 in name only": [rounded, rounded_in_a_kernel],
    "fp32 op in 16 bits": [loss],
}
"""By what ``Entry.why`` says."""

_NEEDS_FP16 = (overflow, flushed)
_IN_16_BITS = (overflow, cancellation, flushed)


@dataclass(frozen=True)
class Fault:
    """A model with one fault.

    Attributes:
        why: the kind.
        name: of the model.
        module: where the fault is.
        dtype: the 16-bit dtype of the candidate.
        trial: the model and its step.
    """

    why: str
    name: str
    module: str
    dtype: torch.dtype
    trial: Trial


def put(dice: random.Random, trial: Trial, inject: Any, dtype: torch.dtype, *, in_16_bits: bool) -> str:
    """Put a fault into a random layer, whose name is returned."""
    leaves = [key for key, module in trial.model.named_modules() if not module._modules]
    if in_16_bits:  # their values would be right in fp32, which norms and embeddings return
        leaves = [key for key in leaves if isinstance(trial.model.get_submodule(key), (nn.Linear, nn.Conv2d))]
    place = dice.choice(leaves)
    module = trial.model.get_submodule(place)
    forward = module.forward
    module.forward = lambda x: inject(forward(x), dtype, trial)  # type: ignore[method-assign]
    return place


def draw(dice: random.Random, why: str) -> Fault:
    """A fault of one kind, at a random place of a random model.

    Args:
        dice: what is random.
        why: a key of ``KINDS``.
    """
    inject = dice.choice(KINDS[why])
    name = dice.choice(sorted(MODELS))
    torch.manual_seed(dice.randrange(1000))
    dtype = torch.float16 if inject in _NEEDS_FP16 else dice.choice([torch.float16, torch.bfloat16])
    trial = MODELS[name]()
    place = put(dice, trial, inject, dtype, in_16_bits=inject in _IN_16_BITS)
    return Fault(why, name, place, dtype, trial)
