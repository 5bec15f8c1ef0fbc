"""Masks that keep two of four weights."""

from __future__ import annotations

import torch

from .....core.errors import ArgumentValueError

__all__ = ["create_mask"]


def create_mask(tensor: torch.Tensor, pattern: str = "m4n2_1d", density: float = 0.5) -> torch.Tensor:
    """A mask, of the dtype of ``tensor``, of the two largest of each four numbers along dimension 1.

    Dimension 1 is the input of a linear or convolutional layer; a tensor of one dimension goes along that. Where its
    length is no multiple of four, the last group is filled with zeros.

    Args:
        tensor: floating, of one to five dimensions.
        pattern: must be "m4n2_1d".
        density: must be 0.5.

    Raises:
        ArgumentValueError: for another pattern or density.
    """
    if pattern != "m4n2_1d" or density != 0.5:
        raise ArgumentValueError(
            f"pattern={pattern!r} with density={density} is not offered, only 'm4n2_1d' with 0.5. "
            "ASP takes a function of a weight that returns its mask as mask_calculator."
        )
    dim = min(1, tensor.dim() - 1)
    size = tensor.detach().abs().float().movedim(dim, -1)
    groups = torch.nn.functional.pad(size, (0, -size.shape[-1] % 4)).unflatten(-1, (-1, 4))
    mask = torch.zeros_like(groups).scatter_(-1, groups.topk(2, dim=-1).indices, 1.0)
    return mask.flatten(-2)[..., : size.shape[-1]].movedim(-1, dim).to(tensor.dtype).contiguous()
