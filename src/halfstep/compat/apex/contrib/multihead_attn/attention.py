"""The common part of the two attention modules of ``apex.contrib.multihead_attn``."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from .....core.errors import ArgumentValueError
from ...normalization import FusedLayerNorm, fused_layer_norm_affine

__all__ = ["MultiheadAttn", "heads_of", "mask_of"]


class MultiheadAttn(nn.Module):
    """Attention of several heads, on ``scaled_dot_product_attention``. Tensors are of shape [time, batch, embed_dim].

    ``impl`` chose between kernels. Here both are the same; it only decides on the names of the parameters of the layer
    normalization, so that checkpoints load.

    Args:
        embed_dim: width of the input, a multiple of ``num_heads``.
        num_heads: number of heads.
        dropout: share of the attention probabilities that is dropped.
        bias: whether the linear layers have biases.
        include_norm_add: normalize the query before, and add the query to the output after, with dropout.
        impl: "fast" or "default".

    Raises:
        ArgumentValueError: if the heads do not divide the width, or for another ``impl``.
    """

    out_proj_bias: torch.Tensor | None
    lyr_nrm: FusedLayerNorm | None
    lyr_nrm_gamma_weights: nn.Parameter | None
    lyr_nrm_beta_weights: nn.Parameter | None

    def __init__(
        self, embed_dim: int, num_heads: int, dropout: float, bias: bool, include_norm_add: bool, impl: str
    ) -> None:
        super().__init__()
        if embed_dim % num_heads:
            raise ArgumentValueError(f"embed_dim={embed_dim} must be a multiple of num_heads={num_heads}.")
        if impl not in ("fast", "default"):
            raise ArgumentValueError(f"impl={impl!r} must be 'fast' or 'default'.")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.dropout = dropout
        self.bias = bias
        self.include_norm_add = include_norm_add
        self.impl = impl

    def _add_output_and_norm(self) -> None:
        """Make the parameters that come last: of the output's linear layer, and of the layer normalization."""
        width = self.embed_dim
        self.out_proj_weight = nn.Parameter(torch.empty(width, width))
        self._add_bias("out_proj_bias", width)
        if self.include_norm_add and self.impl == "fast":
            self.lyr_nrm_gamma_weights = nn.Parameter(torch.empty(width))
            self.lyr_nrm_beta_weights = nn.Parameter(torch.empty(width))
            self.lyr_nrm = None
        elif self.include_norm_add:
            self.lyr_nrm_gamma_weights = self.lyr_nrm_beta_weights = None
            self.lyr_nrm = FusedLayerNorm(width)

    def _add_bias(self, name: str, width: int) -> None:
        self.register_parameter(name, nn.Parameter(torch.empty(width)) if self.bias else None)

    def reset_parameters(self) -> None:
        """Xavier's weights for the linear layers, zeros for biases, ones for the normalization's weight."""
        for name, param in self.named_parameters(recurse=False):
            if name.endswith("gamma_weights"):
                nn.init.ones_(param)
            elif param.dim() == 1:
                nn.init.zeros_(param)
            else:
                # This stack of three square matrices is initialized as each of them would be by itself.
                nn.init.xavier_uniform_(param, gain=2**0.5 if name == "in_proj_weight" else 1.0)
        if self.include_norm_add and self.lyr_nrm is not None:
            self.lyr_nrm.reset_parameters()

    def _normalized(self, query: torch.Tensor) -> torch.Tensor:
        if not self.include_norm_add:
            return query
        if self.lyr_nrm is not None:
            normalized: torch.Tensor = self.lyr_nrm(query)
            return normalized
        gamma, beta = self.lyr_nrm_gamma_weights, self.lyr_nrm_beta_weights
        assert gamma is not None
        assert beta is not None
        return fused_layer_norm_affine(query, gamma, beta, [self.embed_dim], 1e-5)

    def _heads(self, projected: torch.Tensor, parts: int) -> tuple[torch.Tensor, ...]:
        return heads_of(projected, self.num_heads, parts)

    def _attend(
        self,
        query: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        is_training: bool,
    ) -> torch.Tensor:
        drop = self.dropout if is_training else 0.0
        if mask is not None and mask.is_floating_point():
            mask = mask.to(q.dtype)
        heads = F.scaled_dot_product_attention(q, k, v, mask, drop, scale=self.scaling)
        time, batch, width = query.shape
        out = F.linear(heads.permute(2, 0, 1, 3).reshape(time, batch, width), self.out_proj_weight, self.out_proj_bias)
        return query + F.dropout(out, drop) if self.include_norm_add else out


def heads_of(projected: torch.Tensor, heads: int, parts: int) -> tuple[torch.Tensor, ...]:
    """[time, batch, heads * parts * head_dim] as ``parts`` tensors of shape [batch, heads, time, head_dim]."""
    time, batch, width = projected.shape
    split = projected.view(time, batch, heads, parts, width // (heads * parts))
    return split.permute(3, 1, 2, 0, 4).unbind(0)


def mask_of(
    key_padding_mask: torch.Tensor | None, attn_mask: torch.Tensor | None, additive: bool = False
) -> torch.Tensor | None:
    """The mask as ``scaled_dot_product_attention`` takes it: True where a key counts, or what is added to scores.

    Raises:
        ArgumentValueError: if there are two masks.
    """
    if key_padding_mask is not None and attn_mask is not None:
        raise ArgumentValueError("Pass either key_padding_mask or attn_mask, not both.")
    mask = attn_mask if key_padding_mask is None else key_padding_mask[:, None, None, :]
    return mask if mask is None or additive else ~mask.bool()
