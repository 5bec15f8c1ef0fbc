"""Signatures of calls of a training step: the kinds of its inputs, not their values."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any

import torch

from ...core.dtypes import dtype_name
from ...torch_internals.torch_compat import tree_flatten

__all__ = ["PLAIN", "Signature", "roots_of", "signature_key", "signature_of"]

PLAIN = (int, float, bool, str, bytes, type(None))
"""Non-tensor types that a batch may hold: batches with equal values of these types are of one kind."""


@dataclass
class Signature:
    """One kind of batch that a ``TrainStep`` has seen.

    Attributes:
        inputs: each tensor of the batch as dtype, shape and device, for example ``"float32[64, 256] cpu"``; plain
                values as their ``repr``, other values as their type.
            training: True if the model was in training mode.
            runs: the current way of running its steps: ``"eager"``, ``"compiled"``, ``"in parts"`` (forward and
                backward compiled, the rest eager) or ``"CUDA graph"``.
            reason: the reason why its steps do not run in the requested way; None if they do.
            calls: the number of calls with batches of this kind.
            replays: the number of these calls that replayed CUDA graphs.
    """

    inputs: tuple[str, ...]
    training: bool
    runs: str = "eager"
    reason: str | None = None
    calls: int = 0
    replays: int = 0


def roots_of(function: object) -> list[torch.nn.Module]:
    """Find the modules that a callable is, belongs to, closes over or refers to by name."""
    if isinstance(function, torch.nn.Module):
        return [function]
    owner, function = getattr(function, "__self__", None), getattr(function, "__func__", function)
    reached = [owner]
    if isinstance(function, FunctionType):
        reached += [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
        reached += [function.__globals__.get(name) for name in function.__code__.co_names]
    return [module for module in reached if isinstance(module, torch.nn.Module)]


def signature_key(batch: tuple[Any, ...], training: bool) -> Hashable:
    """Return the kind of a batch: all batches of one kind run the same compiled or recorded step."""
    leaves, structure = _leaves(batch)
    return structure, training, tuple([_kind(leaf) for leaf in leaves])


def signature_of(batch: tuple[Any, ...], training: bool) -> Signature:
    """Make the signature for the first batch of its kind."""
    leaves, _ = _leaves(batch)
    return Signature(tuple(map(_in_words, leaves)), training)


def _leaves(batch: tuple[Any, ...]) -> tuple[Sequence[Any], str]:
    if all(type(x) is torch.Tensor for x in batch):  # the usual batch
        return batch, ""
    leaves, structure = tree_flatten(batch)
    return leaves, str(structure)


def _kind(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
    return type(leaf), repr(leaf) if isinstance(leaf, PLAIN) else None


def _in_words(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{dtype_name(leaf.dtype)}{list(leaf.shape)} {leaf.device}"
    return repr(leaf) if isinstance(leaf, PLAIN) else type(leaf).__name__
