"""A closure that is given to a step, evaluated as mixed precision needs it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from ..casting.scope import OpCasting
from ..core.errors import UsageError
from .backward import Window, any_overflow

__all__ = ["ClosureOverflowed", "guarded"]

logger = logging.getLogger("halfstep")

_RETRIES = 64  # enough to bring any float32 scale down to its floor by halving, twice over


class ClosureOverflowed(Exception):  # noqa: N818 - never leaves a step
    """Leaves an optimizer's step before it has changed anything."""


def guarded(closure: Callable[[], Any], window: Window, casting: OpCasting | None, verbose: bool) -> Callable[[], Any]:
    """A closure that sees up-to-date 16-bit weights and the casts, and is run again when it overflows.

    Its attribute ``loss`` is what the user's closure returned last.

    A static loss scale would overflow again in the same way. There the step is skipped, if nothing has moved yet.

    Args:
        closure: the user's.
        window: the window of the optimizer, whose masters leave their places while the closure runs.
        casting: the op casting in force around the step, which itself runs without.
        verbose: True to log that the closure runs again.
    """
    first, name = True, type(window.keeper.optimizer).__name__

    def evaluate() -> Any:
        nonlocal first
        with window.keeper.out_of_place():
            for _ in range(_RETRIES):
                with torch.enable_grad(), casting if casting is not None else nullcontext():
                    loss = closure()
                records = window.take_records()
                if not records or not any_overflow(records).item():
                    first, vars(evaluate)["loss"] = False, loss
                    return loss
                if not any(record.dynamic for record in records):
                    if first:
                        raise ClosureOverflowed
                    raise UsageError(
                        f"The closure given to {name}.step overflowed under a static loss scale after the optimizer "
                        "had moved the weights; use a lower scale, or a dynamic one."
                    )
                if verbose:
                    logger.info("Gradient overflow. Running the closure again")
        raise UsageError(
            f"The closure given to {name}.step overflowed {_RETRIES} times in a row, each time at a lower loss scale; "
            "its loss or its gradients are not finite at any scale."
        )

    return evaluate
