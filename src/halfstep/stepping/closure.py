"""Evaluation of the closure that user code gives to ``step``, with op casts, loss scaling and retries."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from ..casting.scope import OpCasting
from ..core.errors import UsageError
from ..parameters.masters import out_of_place
from .backward import Window, any_overflow

__all__ = ["ClosureOverflowed", "guard"]

logger = logging.getLogger("halfstep")

_RETRIES = 64  # twice the number of halvings that bring any float32 scale down to its floor


class ClosureOverflowed(Exception):  # noqa: N818 - never leaves a step
    """Raised in a closure to leave an optimizer's step before the step changes anything."""


def guard(closure: Callable[[], Any], window: Window, casting: OpCasting | None, verbose: bool) -> Callable[[], Any]:
    """Wrap a closure so that it runs with up-to-date 16-bit weights and op casts, and again after an overflow.

    The attribute ``loss`` of the wrapper is the latest result of ``closure``.

    With a static loss scale a second run would overflow in the same way, so the step is skipped. That is only possible
    if the optimizer has not changed any weight yet; otherwise the wrapper raises ``UsageError``.

    Args:
        closure: the user's closure.
        window: the window of the optimizer. While the closure runs, the optimizer's groups hold the 16-bit weights
            instead of masters.
        casting: the op casting that is active around the step, for the closure only; the step runs without it.
        verbose: True to log each retry.
    """
    first, name = True, type(window.table.optimizer()).__name__

    def evaluate() -> Any:
        nonlocal first
        with out_of_place(window.plain):
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
                        "had changed the weights; use a lower loss scale, or a dynamic one."
                    )
                if verbose:
                    logger.info("Gradient overflow. Running the closure again at a lower loss scale")
        raise UsageError(
            f"The closure given to {name}.step overflowed {_RETRIES} times in a row, each time at a lower loss scale. "
            "Its loss or gradients are inf or NaN at any scale; check the loss and its inputs."
        )

    return evaluate
