"""The middle of an attention layer: mask, softmax and dropout of scores."""

from __future__ import annotations

import torch
from torch.nn import functional as F

__all__ = ["fast_mask_softmax_dropout_func"]


def fast_mask_softmax_dropout_func(
    is_training: bool,
    heads: int,
    inputs: torch.Tensor,
    pad_mask: torch.Tensor | None,
    mask_additive: bool,
    dropout_prob: float,
) -> torch.Tensor:
    """Softmax of scores over keys, with dropout while training.

    Args:
        is_training: whether to drop.
        heads: number of heads.
        inputs: scores of shape [sequences * heads, queries, keys].
        pad_mask: of shape [sequences, keys]; where it is nonzero a key is left out, or it is added to the scores.
        mask_additive: whether it is added.
        dropout_prob: share of the probabilities that is dropped.
    """
    scores = inputs
    if pad_mask is not None:
        mask = pad_mask.repeat_interleave(heads, 0).unsqueeze(1)
        scores = scores + mask if mask_additive else scores.masked_fill(mask.bool(), float("-inf"))
    return F.dropout(F.softmax(scores, dim=-1), dropout_prob, is_training).to(inputs.dtype)
