"""Who watches the steps of attached optimizers: reports, monitors, callbacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .attached import AttachedOptimizer

__all__ = ["Observer", "observers"]


class Observer(Protocol):
    """Who watches."""

    def before_step(self, attached: AttachedOptimizer) -> None:
        """A step is about to be taken or skipped."""

    def after_step(self, attached: AttachedOptimizer) -> None:
        """It was."""


observers: list[Observer] = []
"""Told of every step of every attached optimizer; whoever watches puts itself here while it does."""
