"""A kind of model that people train: a small model with its loss, written as public code writes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["KINDS", "Kind", "kind"]


@dataclasses.dataclass(frozen=True)
class Kind:
    """How to make one training.

    Args:
        make: returns a model and its loss, a function without arguments; or a list of models and a list of losses, one
            for each optimizer in turn.
        steps: of each optimizer.
        lr: of all optimizers.
        optimizer: a class of ``torch.optim``.
        noise: whether each step has random numbers of its own, so that dtypes change the course of a training. Its
            end loss is then the mean of the last half.
        at_o2: options of ``amp.initialize`` at O2 that its kind of model needs.
    """

    make: Callable[[], tuple[Any, Any]]
    steps: int = 30
    lr: float = 1e-2
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam
    noise: bool = False
    at_o2: Mapping[str, Any] = dataclasses.field(default_factory=dict)


KINDS: dict[str, Kind] = {}


def kind(name: str, **options: Any) -> Callable[[Callable[[], tuple[Any, Any]]], Callable[[], tuple[Any, Any]]]:
    """Add a training to the table."""

    def add(make: Callable[[], tuple[Any, Any]]) -> Callable[[], tuple[Any, Any]]:
        KINDS[name] = Kind(make, **options)
        return make

    return add
