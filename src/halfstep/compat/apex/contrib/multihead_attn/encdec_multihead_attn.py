"""Attention of one sequence to another."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from .attention import MultiheadAttn, mask_of

__all__ = ["EncdecMultiheadAttn"]


class EncdecMultiheadAttn(MultiheadAttn):
    """Attention of one sequence to another. See ``MultiheadAttn`` for the arguments.

    In ``in_proj_weight_kv`` the rows of a head stand together: its key, its value.

    Args:
        embed_dim: width.
        num_heads: number of heads.
        dropout: of the probabilities.
        bias: whether there are biases.
        include_norm_add: with layer normalization and residual, of the query.
        impl: "fast" or "default".
    """

    in_proj_bias_q: torch.Tensor | None
    in_proj_bias_kv: torch.Tensor | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = False,
        include_norm_add: bool = False,
        impl: str = "fast",
    ) -> None:
        super().__init__(embed_dim, num_heads, dropout, bias, include_norm_add, impl)
        self.in_proj_weight_q = nn.Parameter(torch.empty(embed_dim, embed_dim))
        self.in_proj_weight_kv = nn.Parameter(torch.empty(2 * embed_dim, embed_dim))
        self._add_bias("in_proj_bias_q", embed_dim)
        self._add_bias("in_proj_bias_kv", 2 * embed_dim)
        self._add_output_and_norm()
        self.reset_parameters()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None = None,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = False,
        attn_mask: torch.Tensor | None = None,
        is_training: bool = True,
    ) -> tuple[torch.Tensor, None]:
        """Attend.

        Args:
            query: of shape [queries, batch, embed_dim].
            key: of shape [keys, batch, embed_dim]. Values are made from it, too.
            value: not read, as in Apex.
            key_padding_mask: of shape [batch, keys]; nonzero where a key is left out.
            need_weights: not read, as in Apex: no weights are returned.
            attn_mask: of shape [queries, keys]; nonzero where a query does not see a key.
            is_training: whether to drop. As in Apex, ``train()`` and ``eval()`` do not change it.

        Returns:
            A tensor like ``query``, and None.

        Raises:
            ArgumentValueError: if there are two masks.
        """
        mask = mask_of(key_padding_mask, attn_mask)
        (q,) = self._heads(F.linear(self._normalized(query), self.in_proj_weight_q, self.in_proj_bias_q), 1)
        k, v = self._heads(F.linear(key, self.in_proj_weight_kv, self.in_proj_bias_kv), 2)
        return self._attend(query, q, k, v, mask, is_training), None
