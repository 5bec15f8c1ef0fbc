"""A closure given to an optimizer's step, as mixed precision needs it evaluated."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from ..casting import scopes as ops
from ..core.errors import UsageError
from ..distributed.ddp_sync import any_overflow
from ..gradients.ledger import widen

if TYPE_CHECKING:
    from .attached import AttachedOptimizer

__all__ = ["ClosureOverflowed", "guarded"]

logger = logging.getLogger("halfstep")

_RETRIES = 64  # enough to bring any float32 scale down to its floor by halving, twice over


class ClosureOverflowed(Exception):  # noqa: N818 - never leaves a step
    """Leaves an optimizer's step before it has changed anything."""


def guarded(
    attached: AttachedOptimizer, closure: Callable[[], Any], casting: ops.OpCasting | None
) -> Callable[[], Any]:
    """A closure that sees up-to-date 16-bit weights and the casts, and is run again when it overflows.

    Under a static scale the same would come again. Then the step is skipped, if nothing has moved yet.

    Args:
        attached: the optimizer whose step will call it.
        closure: the user's.
        casting: the op casting in force around the step, which itself runs without.
    """
    first = True
    name = type(attached.optimizer).__name__

    def evaluate() -> Any:
        nonlocal first
        masters = attached.keeper.plain
        if masters is not None:
            masters.leave(attached.optimizer)
        for _ in range(_RETRIES):
            with torch.enable_grad(), casting if casting is not None else nullcontext():
                loss = closure()
            attached.catch_up()
            passes, attached.passes = attached.passes, []
            if not passes or not any_overflow(passes).item():
                first = False
                if masters is not None:
                    widen(attached.params())
                    masters.enter(attached.optimizer)
                return loss
            if not any(passed.dynamic for passed in passes):
                if first:
                    raise ClosureOverflowed
                raise UsageError(
                    f"The closure given to {name}.step overflowed under a static loss scale after the optimizer had "
                    "moved the weights; use a lower scale, or a dynamic one."
                )
            if attached.verbose:
                logger.info("Gradient overflow. Running the closure again")
        raise UsageError(
            f"The closure given to {name}.step overflowed {_RETRIES} times in a row, each time at a lower loss scale; "
            "its loss or its gradients are not finite at any scale."
        )

    return evaluate
