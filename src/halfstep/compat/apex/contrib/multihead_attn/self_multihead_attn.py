"""Attention of a sequence to itself."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from .attention import MultiheadAttn, mask_of

__all__ = ["SelfMultiheadAttn"]


class SelfMultiheadAttn(MultiheadAttn):
    """Attention of a sequence to itself. See ``MultiheadAttn`` for the first six arguments.

    In ``in_proj_weight`` the rows of a head stand together: its query, its key, its value.

    Args:
        embed_dim: width.
        num_heads: number of heads.
        dropout: of the probabilities.
        bias: whether there are biases.
        include_norm_add: with layer normalization and residual.
        impl: "fast" or "default".
        separate_qkv_params: ``q_weight``, ``k_weight`` and ``v_weight`` instead of ``in_proj_weight``.
        mask_additive: masks are added to the scores.
    """

    in_proj_bias: torch.Tensor | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = False,
        include_norm_add: bool = False,
        impl: str = "fast",
        separate_qkv_params: bool = False,
        mask_additive: bool = False,
    ) -> None:
        super().__init__(embed_dim, num_heads, dropout, bias, include_norm_add, impl)
        self.separate_qkv_params = separate_qkv_params
        self.mask_additive = mask_additive
        if separate_qkv_params:
            for part in "qkv":
                self.register_parameter(f"{part}_weight", nn.Parameter(torch.empty(embed_dim, embed_dim)))
            for part in "qkv":
                self._add_bias(f"{part}_bias", embed_dim)
        else:
            self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim))
            self._add_bias("in_proj_bias", 3 * embed_dim)
        self._add_output_and_norm()
        self.reset_parameters()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = False,
        attn_mask: torch.Tensor | None = None,
        is_training: bool = True,
    ) -> tuple[torch.Tensor, None]:
        """Attend.

        Args:
            query: of shape [time, batch, embed_dim]. Keys and values are made from it, too.
            key: not read, as in Apex.
            value: not read, as in Apex.
            key_padding_mask: of shape [batch, time]; nonzero where a key is left out, or added to the scores.
            need_weights: not read, as in Apex: no weights are returned.
            attn_mask: of shape [time, time]; nonzero where a query does not see a key, or added to the scores.
            is_training: whether to drop. As in Apex, ``train()`` and ``eval()`` do not change it.

        Returns:
            A tensor like ``query``, and None.

        Raises:
            ArgumentValueError: if there are two masks.
        """
        mask = mask_of(key_padding_mask, attn_mask, self.mask_additive)
        x = self._normalized(query)
        if self.separate_qkv_params:
            q, k, v = (
                self._heads(F.linear(x, getattr(self, f"{part}_weight"), getattr(self, f"{part}_bias")), 1)[0]
                for part in "qkv"
            )
        else:
            q, k, v = self._heads(F.linear(x, self.in_proj_weight, self.in_proj_bias), 3)
        return self._attend(query, q, k, v, mask, is_training), None
