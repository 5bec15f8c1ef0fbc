"""What tells two calls of a training step apart: the kind of their inputs, not the values."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..core.dtypes import dtype_name
from ..core.torch_compat import tree_flatten

__all__ = ["Signature", "signature_key"]


@dataclass
class Signature:
    """One kind of batch that a ``TrainStep`` has met.

    Attributes:
        inputs: each tensor of the batch as dtype, shape and device, for example ``"float32[64, 256] cpu"``; anything
            else as its ``repr``.
        training: whether the model was in training mode.
        runs: how its steps are taken now: ``"eager"``, ``"compiled"``, ``"in parts"`` (forward and backward compiled,
            the rest eager) or ``"CUDA graph"``.
        reason: why they are not taken as was asked for; None if they are.
        calls: how often it came.
        replays: how many of these were replays of CUDA graphs.
    """

    inputs: tuple[str, ...]
    training: bool
    runs: str = "eager"
    reason: str | None = None
    calls: int = 0
    replays: int = 0


def signature_key(batch: Sequence[Any], training: bool) -> tuple[Hashable, Signature]:
    """The key of a batch, and a new ``Signature`` for it."""
    leaves, structure = tree_flatten(tuple(batch))
    parts: list[Hashable] = []
    inputs = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            parts.append((tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad))
            inputs.append(f"{dtype_name(leaf.dtype)}{list(leaf.shape)} {leaf.device}")
        else:
            parts.append((type(leaf), repr(leaf)))
            inputs.append(repr(leaf))
    return (tuple(parts), str(structure), training), Signature(tuple(inputs), training)
