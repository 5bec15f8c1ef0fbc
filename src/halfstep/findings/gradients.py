"""The gradients that a backward pass has left, and whether any of them is other than zero."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ..gradients.ledger import get_grads
from ..observe.samples import Reading, can_sample, sample

__all__ = ["ZERO_GRADIENTS_FIX", "ask_gradients", "gradients_of"]

ZERO_GRADIENTS_FIX = (
    "in float16 use a loss scale (amp.GradScaler(), loss_scale='dynamic'), or bfloat16: numbers below 6e-8 become 0; "
    "else see what cuts the graph or multiplies by 0: detach(), a mask, a dead ReLU"
)

_TENSORS, _ELEMENTS = 16, 64


def ask_gradients(params: Sequence[torch.Tensor], reading: Reading) -> slice | None:
    """Ask of some gradients whether any number is other than 0; None if there are no gradients."""
    have = [p for p, grad in zip(params, get_grads(params), strict=True) if grad is not None]
    some = [grad for _, grad in gradients_of(have[:: -(-len(have) // _TENSORS)])] if have else []
    some = [grad for grad in some if grad.device == some[0].device]
    return reading.ask(torch.cat([sample(grad, _ELEMENTS) for grad in some]).any()) if some else None


def gradients_of(params: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The parameters that have dense gradients, with these."""
    for param, grad in zip(params, get_grads(params), strict=True):
        if grad is not None and not grad.is_sparse and grad.numel() and can_sample(grad):
            yield param, grad
