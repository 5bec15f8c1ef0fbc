"""``apex_C``: many tensors in one, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["flatten", "unflatten"]


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate tensors of one dtype and device in a new tensor of one dimension."""
    return torch.cat([tensor.contiguous().view(-1) for tensor in tensors])


def unflatten(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of ``flat`` in the shapes of ``tensors``."""
    pieces = flat.split([tensor.numel() for tensor in tensors])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]
