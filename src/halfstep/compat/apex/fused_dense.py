"""``apex.fused_dense``, on ``torch.nn.Linear``. Weights are initialized; Apex left them uninitialized."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ...core.errors import ArgumentValueError
from ..submodules import add_submodules

__all__ = [
    "FusedDense",
    "FusedDenseGeluDense",
    "dense_no_bias_function",
    "fused_dense_function",
    "fused_dense_gelu_dense_function",
]


def fused_dense_function(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Apply a linear layer."""
    return F.linear(input, weight, bias)


def dense_no_bias_function(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Apply a linear layer without a bias."""
    return F.linear(input, weight)


def fused_dense_gelu_dense_function(
    input: torch.Tensor, weight1: torch.Tensor, bias1: torch.Tensor, weight2: torch.Tensor, bias2: torch.Tensor
) -> torch.Tensor:
    """Linear, GELU, linear."""
    return F.linear(F.gelu(F.linear(input, weight1, bias1)), weight2, bias2)


class FusedDense(nn.Linear):
    """``torch.nn.Linear``."""


class FusedDenseGeluDense(nn.Module):
    """Linear, GELU, linear.

    Args:
        in_features: width of the input.
        intermediate_features: width between the layers.
        out_features: width of the output.
        bias: must be True.

    Raises:
        ArgumentValueError: without biases.
    """

    def __init__(self, in_features: int, intermediate_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        if not bias:
            raise ArgumentValueError("FusedDenseGeluDense has biases; bias=False is not supported.")
        self.in_features = in_features
        self.intermediate_features = intermediate_features
        self.out_features = out_features
        first, second = nn.Linear(in_features, intermediate_features), nn.Linear(intermediate_features, out_features)
        self.weight1, self.bias1, self.weight2, self.bias2 = first.weight, first.bias, second.weight, second.bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Run on a floating tensor of shape [..., in_features]."""
        return fused_dense_gelu_dense_function(input, self.weight1, self.bias1, self.weight2, self.bias2)


add_submodules(__name__, {"fused_dense": " ".join(__all__)})
