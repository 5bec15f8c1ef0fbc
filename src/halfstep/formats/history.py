"""``AmaxHistory``: what a layer with a recipe remembers of its operands. Its ops are no ops of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .format import Format

__all__ = ["AmaxHistory"]

_HISTORY = 16
"""The number of latest tensors whose largest value gives a delayed scale."""


class AmaxHistory:
    """Facts about a layer's operands in earlier steps: largest values for delayed scales, and what rounding lost.

    Only backward passes note largest values, so that neither an evaluation nor the second forward pass of checkpointing
    changes a scale. What rounding lost is noted within ``measuring`` alone. Copies and pickles of a layer begin anew,
    as a layer from a checkpoint does.

    Attributes:
        delayed: True if scales come from earlier tensors.
        latest: the largest values of the latest tensors by place: ``"input"``, ``"weight"`` and so on.
        losses: by place, the share of numbers that saturated and the share of blocks that lost more than half of their
            numbers, in the latest pass that was measured.
        noise: by gradient, the norm of the product of operands that are not rounded, and of its difference to it.
        tokens: the number of rows that the latest measured weight gradient is a sum of.
    """

    def __init__(self, delayed: bool = False) -> None:
        self.delayed = delayed
        self.latest: dict[str, Tensor] = {}
        self.losses: dict[str, Tensor] = {}
        self.noise: dict[str, Tensor] = {}
        self.tokens = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return AmaxHistory, (self.delayed,)

    def scales(
        self, tensors: Sequence[Tensor], formats: Sequence[Format | None], places: Sequence[str]
    ) -> list[Tensor | None]:
        """The largest values that the scales of operands allow for: None for the current ones."""
        return [
            self._largest(place, tensor) if self.delayed and format is not None and format.block == "tensor" else None
            for tensor, format, place in zip(tensors, formats, places, strict=True)
        ]

    def _largest(self, place: str, tensor: Tensor) -> Tensor:
        """The largest value of the tensors before this one.

        Without any, and if this one is not finite, it is the value of this one: rounding would hide an overflow.
        """
        now = _largest(tensor)
        largest = self._before(place, now).amax()
        return torch.where(now.isfinite() & (largest > 0), largest, now)

    def note(self, tensors: Sequence[Tensor], places: Sequence[str]) -> None:
        """Add the largest values of the tensors of a step, unless they are not finite."""
        for place, now in zip(places, map(_largest, tensors), strict=True) if self.delayed else ():
            before = self._before(place, now)
            self.latest = self.latest | {place: torch.cat([before[1:], now.where(now.isfinite(), 0.0).view(1)])}

    def _before(self, place: str, now: Tensor) -> Tensor:
        """The largest values of the latest tensors in a place; zeros for tensors that there were not."""
        before = self.latest.get(place)
        return now.new_zeros(_HISTORY) if before is None or before.device != now.device else before


def _largest(tensor: Tensor) -> Tensor:
    return tensor.detach().abs().amax().float() if tensor.numel() else tensor.new_zeros((), dtype=torch.float32)
