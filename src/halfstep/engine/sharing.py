"""Parameters in two optimizers: their gradient must be unscaled once, by whichever optimizer comes first."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["SharedGradients"]


class _Done(NamedTuple):
    """What one optimizer had unscaled, after how many losses, and what the gradients were then."""

    optimizer: torch.optim.Optimizer
    params: list[torch.Tensor]
    losses: int
    marks: dict[int, tuple[torch.Tensor, int]]


class SharedGradients:
    """Which gradients another optimizer has had unscaled in this iteration.

    ::

        unscaled already = the gradient is the same tensor as then, and
                           (its version is the same, or no loss was scaled since: then an edit was no backward pass)

    Nothing is kept about gradients that no second optimizer has, but in the first iteration, when that is not known.

    Attributes:
        losses: how many losses were scaled in this iteration.
    """

    def __init__(self) -> None:
        self.losses = 0
        self._done: list[_Done] = []
        self._first_iteration = True
        self._shared: set[int] = set()

    def begin_iteration(self) -> None:
        """Forget the last one."""
        self.losses = 0
        if self._done:
            self._first_iteration = False
            self._done = []

    def note_loss(self) -> None:
        """A loss was scaled."""
        self.losses += 1

    def already_unscaled(
        self, optimizer: torch.optim.Optimizer, params: list[torch.Tensor]
    ) -> dict[int, torch.Tensor] | None:
        """The parameters of an optimizer whose gradients another one has had unscaled, by identity; None for none."""
        others = [done for done in self._done if done.optimizer is not optimizer]
        if not others:
            return None
        mine = set(map(id, params))
        found: dict[int, torch.Tensor] = {}
        for done in others:
            for param in done.params:
                if id(param) in mine:
                    self._shared.add(id(param))
                    if self._is_same(param.grad, done.marks.get(id(param)), done.losses):
                        found[id(param)] = param
        return found or None

    def note_unscaled(self, optimizer: torch.optim.Optimizer, params: list[torch.Tensor]) -> None:
        """The gradients of an optimizer are unscaled now."""
        marks: dict[int, tuple[torch.Tensor, int]] = {}
        if self._first_iteration or self._shared:
            marks = {
                id(p): (p.grad, p.grad._version)
                for p in params
                if p.grad is not None and (self._first_iteration or id(p) in self._shared)
            }
        self._done.append(_Done(optimizer, params, self.losses, marks))

    def _is_same(self, grad: torch.Tensor | None, mark: tuple[torch.Tensor, int] | None, losses: int) -> bool:
        if grad is None:
            return False
        if mark is None:
            return losses == self.losses
        return grad is mark[0] and (grad._version == mark[1] or losses == self.losses)
