"""Attention of one sequence to another as a function of its weights."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from .attention import heads_of, mask_of

__all__ = ["FastEncdecAttnFunc", "fast_encdec_attn_func"]


def fast_encdec_attn_func(
    use_time_mask: bool,
    is_training: bool,
    heads: int,
    inputs_q: torch.Tensor,
    inputs_kv: torch.Tensor,
    input_weights_q: torch.Tensor,
    input_weights_kv: torch.Tensor,
    output_weights: torch.Tensor,
    pad_mask: torch.Tensor | None,
    dropout_prob: float,
) -> torch.Tensor:
    """Attend, without biases; see ``EncdecMultiheadAttn``.

    Args:
        use_time_mask: whether ``pad_mask`` is of shape [queries, keys], and not [batch, keys].
        is_training: whether to drop.
        heads: number of heads.
        inputs_q: of shape [queries, batch, embed_dim].
        inputs_kv: of shape [keys, batch, embed_dim].
        input_weights_q: of shape [embed_dim, embed_dim].
        input_weights_kv: of shape [2 * embed_dim, embed_dim]; the rows of a head stand together: its key, its value.
        output_weights: of shape [embed_dim, embed_dim].
        pad_mask: nonzero where a key is left out.
        dropout_prob: share of the probabilities that is dropped.

    Returns:
        A tensor like ``inputs_q``.
    """
    mask = mask_of(None, pad_mask) if use_time_mask else mask_of(pad_mask, None)
    (q,) = heads_of(F.linear(inputs_q, input_weights_q), heads, 1)
    k, v = heads_of(F.linear(inputs_kv, input_weights_kv), heads, 2)
    attended = F.scaled_dot_product_attention(q, k, v, mask, dropout_prob if is_training else 0.0)
    return F.linear(attended.permute(2, 0, 1, 3).reshape(inputs_q.shape), output_weights)


class FastEncdecAttnFunc:
    """A namespace for ``apply``: in Apex this was an ``autograd.Function``."""

    apply = staticmethod(fast_encdec_attn_func)
