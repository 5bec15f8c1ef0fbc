"""The rule about gradients."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..gradients.ledger import get_grads
from .facts import Facts, gradients_of
from .finding import Found

__all__ = ["ZERO_GRADIENTS_FIX", "zero_gradients"]

ZERO_GRADIENTS_FIX = (
    "in float16 use a loss scale (amp.GradScaler(), loss_scale='dynamic'), or bfloat16: numbers below 6e-8 become 0; "
    "else see what cuts the graph or multiplies by 0: detach(), a mask, a dead ReLU"
)

_MOMENTS = ("exp_avg", "momentum_buffer", "square_avg", "sum")
"""Entries of the state of torch's optimizers that are 0 as long as all gradients are 0."""


def zero_gradients(facts: Facts) -> Iterator[Found]:
    """HS121: the gradients of all parameters are 0, although a backward pass has run.

    It needs gradients, so it is asked after a backward pass and before ``zero_grad``. Gradients that ``zero_grad`` has
    set to 0 are no finding: either the moments of the optimizer are not 0, or the versions tell of the write.
    """
    if facts.any_gradient or facts.any_gradient is None:
        return
    params = facts.trained_params
    pairs = list(gradients_of(params))
    there = sum(grad is not None for grad in get_grads(params))
    if len(pairs) < there or any(bool(grad.any()) for _, grad in pairs):  # a sample has missed it, or it is sparse
        return
    kept = [each for p, _ in pairs for each in _moments(facts, p)]
    untouched = not any(grad._version for _, grad in pairs)
    if any(bool(each.any()) for each in kept) or not (kept or untouched or _would_keep(facts)):
        return
    yield Found(
        "error",
        facts.where([p for p, _ in pairs]),
        f"All gradients are 0: those of {len(pairs)} parameters.",
        {"tensors": len(pairs)},
    )


def _moments(facts: Facts, param: torch.Tensor) -> Iterator[torch.Tensor]:
    for optimizer in facts.optimizers:
        state = optimizer.state.get(param) or {}
        yield from (state[name] for name in _MOMENTS if isinstance(state.get(name), torch.Tensor))


def _would_keep(facts: Facts) -> bool:
    """Whether every optimizer has moments after a step. If it has none, it has not stepped yet."""
    defaults = [optimizer.defaults for optimizer in facts.optimizers]
    return bool(defaults) and all("betas" in each or each.get("momentum") for each in defaults)
