"""Layer normalization of one dimension; the output has the dtype of the weights."""

from __future__ import annotations

import torch
from torch import nn

from ...normalization import mixed_dtype_fused_layer_norm_affine

__all__ = ["FastLayerNorm", "FastLayerNormFN"]


def _fast_layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, epsilon: float = 1e-5, memory_efficient: bool = False
) -> torch.Tensor:
    """Normalize the last dimension of ``x``; ``memory_efficient`` changes no value and is not used."""
    return mixed_dtype_fused_layer_norm_affine(x, weight, bias, [weight.numel()], epsilon)


class FastLayerNormFN:
    """A namespace for ``apply``: in Apex this was an ``autograd.Function``."""

    apply = staticmethod(_fast_layer_norm)


class FastLayerNorm(nn.Module):
    """Layer normalization of the last dimension. Apex had it for certain widths only; here it takes any.

    Args:
        hidden_size: width of the input.
        eps: added to the variance.
        memory_efficient: changes no value and is not used.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-5, memory_efficient: bool = False) -> None:
        super().__init__()
        self.epsilon = eps
        self.memory_efficient = memory_efficient
        self.weight, self.bias = (nn.Parameter(torch.empty(hidden_size)) for _ in range(2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Ones and zeros."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize a floating tensor of shape [..., hidden_size]; the output has the dtype of the weight."""
        return _fast_layer_norm(x, self.weight, self.bias, self.epsilon)
