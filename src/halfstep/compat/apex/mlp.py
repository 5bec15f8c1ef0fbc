"""``apex.mlp``."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

from ...core.errors import ArgumentTypeError
from ..submodules import add_submodules

__all__ = ["MLP", "MlpFunction", "mlp_function"]

_ACTIVATIONS = {"none": lambda x: x, "relu": torch.relu, "sigmoid": torch.sigmoid}


def mlp_function(bias: bool, activation: str, *args: torch.Tensor) -> torch.Tensor:
    """Apply linear layers with an activation after each layer, including the last layer.

    Args:
        bias: True if ``args`` has biases.
        activation: "none", "relu" or "sigmoid".
        *args: the input, of shape [N, in]; the weights; then the biases.

    Raises:
        ArgumentTypeError: for another activation.
    """
    _check_activation(activation)
    x, *rest = args
    weights, biases = (rest[: len(rest) // 2], rest[len(rest) // 2 :]) if bias else (rest, [None] * len(rest))
    for weight, b in zip(weights, biases, strict=True):
        x = _ACTIVATIONS[activation](F.linear(x, weight, b))
    return x


class MlpFunction:
    """A namespace for ``apply``, in place of Apex's autograd function."""

    @staticmethod
    def apply(bias: bool, activation: int | str, *args: torch.Tensor) -> torch.Tensor:
        """Call ``mlp_function``; the activation may also be a number: 0 for none, 1 for ReLU, 2 for sigmoid."""
        name = list(_ACTIVATIONS)[activation] if activation in (0, 1, 2) else activation
        return mlp_function(bool(bias), str(name), *args)


class MLP(nn.Module):
    """Linear layers with an activation after each layer, including the last layer.

    Args:
        mlp_sizes: the width of the input, then of each layer.
        bias: create a bias in each layer.
        activation: "none", "relu" or "sigmoid".

    Raises:
        ArgumentTypeError: for another activation.
    """

    def __init__(self, mlp_sizes: list[int], bias: bool = True, activation: str = "relu") -> None:
        super().__init__()
        _check_activation(activation)
        self.mlp_sizes = list(mlp_sizes)
        self.bias = bias
        self.activation = activation
        self.num_layers = len(mlp_sizes) - 1
        for i, (inputs, outputs) in enumerate(pairwise(mlp_sizes)):
            self.register_parameter(f"weight_{i}", nn.Parameter(torch.empty(outputs, inputs)))
            if bias:
                self.register_parameter(f"bias_{i}", nn.Parameter(torch.empty(outputs)))
        self.reset_parameters()

    @property
    def weights(self) -> list[nn.Parameter]:
        """The weight of each layer."""
        return [getattr(self, f"weight_{i}") for i in range(self.num_layers)]

    @property
    def biases(self) -> list[nn.Parameter]:
        """The bias of each layer; empty without biases."""
        return [getattr(self, f"bias_{i}") for i in range(self.num_layers)] if self.bias else []

    def reset_parameters(self) -> None:
        """Draw normal weights of variance 2 / (in + out) and biases of variance 1 / out, as Apex did."""
        for i, weight in enumerate(self.weights):
            nn.init.normal_(weight, 0.0, math.sqrt(2.0 / sum(weight.shape)))
            if self.bias:
                nn.init.normal_(self.biases[i], 0.0, math.sqrt(1.0 / weight.shape[0]))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Run the layers on an input of shape [N, mlp_sizes[0]]."""
        return mlp_function(self.bias, self.activation, input, *self.weights, *self.biases)

    def extra_repr(self) -> str:
        """Return the arguments as text."""
        return f"MLP sizes: {self.mlp_sizes}, Bias={self.bias}, activation={self.activation}"


def _check_activation(activation: str) -> None:
    if activation not in _ACTIVATIONS:
        raise ArgumentTypeError(f"activation={activation!r} must be 'none', 'relu' or 'sigmoid'.")


add_submodules(__name__, {"mlp": " ".join(__all__)})
