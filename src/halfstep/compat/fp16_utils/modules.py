"""Apex's functions that cast whole networks to 16 bits, implemented by ``casting.modules``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...casting.containers import cast_tree
from ...casting.modules import BatchNorm, cast_module
from ...core.checks import check_kind

__all__ = ["BN_convert_float", "FP16Model", "convert_module", "convert_network", "network_to_half", "tofp16"]


class tofp16(nn.Module):  # noqa: N801 - Apex's name
    """A layer that casts its floating input to float16; integers and booleans pass unchanged."""

    def forward(self, input: Any) -> Any:
        """Return the input, or the container of inputs, with floating tensors as float16."""
        return cast_tree(input, torch.float16)


def BN_convert_float(module: nn.Module) -> nn.Module:  # noqa: N802 - Apex's name
    """Cast every BatchNorm in a module back to fp32, including its running statistics, in place.

    Returns:
        The module.
    """
    for child in module.modules():
        if isinstance(child, BatchNorm):
            convert_module(child, torch.float32)
    return module


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast a module's direct floating parameters, gradients and buffers in place; do not cast its children."""
    cast_module(module, dtype, keep=lambda child: child is not module)


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast a network in place, except for its BatchNorm layers. Parameters keep their identity.

    Args:
        network: any module.
        dtype: torch.float16 or torch.bfloat16, or any other floating dtype.

    Returns:
        The network.
    """
    cast_module(network, dtype, keep=lambda child: isinstance(child, BatchNorm))
    return network


def network_to_half(network: nn.Module) -> nn.Sequential:
    """Return a float16 network that takes fp32 input: ``Sequential(tofp16(), network)`` with fp32 BatchNorm.

    The network is cast in place; the names of its parameters get the prefix ``"1."``.
    """
    check_kind("network_to_half: network", network, nn.Module, "a torch.nn.Module")
    return nn.Sequential(tofp16(), BN_convert_float(convert_network(network, torch.float16)))


class FP16Model(nn.Module):
    """A network cast to float16 with fp32 BatchNorm, which casts floating positional and keyword inputs.

    Args:
        network: any module; cast in place and kept as ``.network``.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, torch.float16)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the output of the network without a cast."""
        return self.network(*cast_tree(inputs, torch.float16), **cast_tree(kwargs, torch.float16))
