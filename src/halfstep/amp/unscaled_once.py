"""Which gradients a ``GradScaler`` has unscaled already, where two of its optimizers share parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

__all__ = ["UnscaledOnce"]


@dataclass
class UnscaledOnce:
    """Which gradients of this iteration are unscaled already, for parameters in two optimizers of one scaler.

    A gradient counts as unscaled if it is the tensor that was noted, and either no loss was scaled since then or its
    version is the same.

    Attributes:
        losses: how many losses were scaled in this iteration.
        noted: what each call of ``note`` has seen.
    """

    losses: int = 0
    noted: list[tuple[int, Sequence[torch.Tensor], list[torch.Tensor | None], list[int | None]]] = field(
        default_factory=list
    )

    def note(self, params: Sequence[torch.Tensor]) -> None:
        """These gradients are unscaled now."""
        grads = [p.grad for p in params]
        self.noted.append((self.losses, params, grads, [None if g is None else g._version for g in grads]))

    def among(self, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those parameters whose gradients are unscaled already."""
        mine = {id(p) for p in params if p.grad is not None}
        found: dict[int, torch.Tensor] = {}
        for losses, *noted in self.noted:
            for param, grad, version in zip(*noted, strict=True):
                if id(param) in mine and param.grad is grad and (losses == self.losses or version == grad._version):
                    found[id(param)] = param
        return list(found.values())
