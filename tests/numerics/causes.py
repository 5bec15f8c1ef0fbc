"""Faults that are put into a training, and the tool that the documentation sends one to for each symptom."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import halfstep
from halfstep import amp, numerics
from tests.numerics.faults import Small, cancellation, flushed, loss, overflow, put, rounded, rounded_in_a_kernel
from tests.numerics.models import MODELS, Trial
from tests.support.worlds import advance

__all__ = ["CAUSES", "Case", "draw", "named"]

_STEPS = 5


@dataclass(frozen=True)
class Case:
    """A training with one fault.

    Attributes:
        cause: a key of ``CAUSES``.
        name: of the model.
        module: where the fault is; empty if it is nowhere in the model.
        dtype: the 16-bit dtype.
        trial: the model and its step.
        make_optimizer: makes the optimizer.
        is_accuracy: whether the symptom is that 16 bits are worse than fp32, which ``compare_step`` is for. Otherwise
            it is NaN, or a loss that does not move, which a ``Monitor`` is for.
    """

    cause: str
    name: str
    module: str
    dtype: torch.dtype
    trial: Trial
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    is_accuracy: bool


class _Gone(Small):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return (grad * 2.0**-24 * 2.0**-24) * 2.0**24 * 2.0**24


def _gone(y: torch.Tensor, half: torch.dtype, trial: Trial) -> torch.Tensor:
    """Gradients of which nothing is left, whatever the loss scale."""
    return _Gone.apply(y)


class Scale(nn.Module):
    """A healthy layer, which hands on what it gets."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1.0


def _hidden_overflow(y: torch.Tensor, half: torch.dtype, trial: Trial) -> torch.Tensor:
    """An overflow that a healthy layer inside of the module gets."""
    return next(each for each in trial.model.modules() if isinstance(each, Scale))(overflow(y, half, trial))


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


_TOO_HIGH: list[Callable[[nn.Module], torch.optim.Optimizer]] = [
    lambda model: torch.optim.SGD(model.parameters(), lr=100 * 0.1),
    lambda model: torch.optim.AdamW(model.parameters(), lr=100 * 1e-3),
    lambda model: torch.optim.Adam(model.parameters(), lr=100 * 1e-3),
    lambda model: torch.optim.RMSprop(model.parameters(), lr=100 * 1e-3),
]

CAUSES: dict[str, list[Callable[[torch.Tensor, torch.dtype, Trial], torch.Tensor]]] = {
    "overflow": [overflow, _hidden_overflow],
    "cancellation": [cancellation],
    "flushed gradients": [flushed, _gone],
    "fp32 in name only": [rounded, rounded_in_a_kernel],
    "loss in 16 bits": [loss],
    "learning rate": [],
}
"""The faults by their cause."""

_NOT_FINITE_OR_STILL = (overflow, _hidden_overflow, _gone)
_NEEDS_FP16 = ("overflow", "flushed gradients")
_IN_16_BITS = ("overflow", "cancellation", "flushed gradients")


def draw(dice: random.Random, cause: str) -> Case:
    """A fault of one kind, at a random place of a random model.

    Args:
        dice: what is random.
        cause: a key of ``CAUSES``.
    """
    name = dice.choice(sorted(MODELS))
    torch.manual_seed(dice.randrange(1000))
    dtype = torch.float16 if cause in _NEEDS_FP16 else dice.choice([torch.float16, torch.bfloat16])
    trial = MODELS[name]()
    if cause == "learning rate":
        return Case(cause, name, "", dtype, trial, dice.choice(_TOO_HIGH), is_accuracy=False)
    inject = dice.choice(CAUSES[cause])
    place = put(dice, trial, inject, dtype, in_16_bits=cause in _IN_16_BITS)
    if inject is _hidden_overflow:
        trial.model.get_submodule(place).add_module("healthy", Scale())
    return Case(cause, name, place, dtype, trial, _sgd, is_accuracy=inject not in _NOT_FINITE_OR_STILL)


# ---- what the tools say

_BY_CHECK = {"HS122": "overflow", "HS105": "loss in 16 bits", "HS112": "fp32 in name only"}
_BY_MONITOR = {
    "HS116": "overflow",
    "HS117": "flushed gradients",
    "HS120": "learning rate",
    "HS121": "flushed gradients",
}
_BY_COMPARISON = {
    "overflow": "overflow",
    "cancellation": "cancellation",
    "underflow": "flushed gradients",
    "fp32 in name only": "fp32 in name only",
    "fp32 op in 16 bits": "loss in 16 bits",
}


def named(case: Case) -> tuple[str, str]:
    """What is named first, cause and module, on the way of "When a run goes wrong": ``check``, then by the symptom."""
    optimizer = case.make_optimizer(case.trial.model)
    model, optimizer = amp.initialize(case.trial.model, optimizer, opt_level="O1", dtype=case.dtype, verbosity=0)
    for finding in halfstep.check(model, optimizer, batch=case.trial.step):
        if finding.severity != "note" and finding.code != "HS111":  # which is about the machine
            return _BY_CHECK.get(finding.code, finding.code), finding.where.split(": ")[0].split(", ")[0]
    if case.is_accuracy:
        first = numerics.compare_step(case.trial.step, model).first()
        return ("", "") if first is None else (_BY_COMPARISON[first.why], first.module)
    with numerics.Monitor(model, optimizer, every=1) as monitor:
        for _ in range(_STEPS):
            advance(case.trial.step(), optimizer)
    for finding in monitor.findings():
        module = finding.evidence.get("module", "")
        return _BY_MONITOR[finding.code], "" if finding.code == "HS120" else module
    return "", ""
