"""Group normalization with an activation, on ``torch.nn.GroupNorm``."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from .....core.errors import ArgumentValueError

__all__ = ["GroupNorm"]


class GroupNorm(nn.GroupNorm):
    """``torch.nn.GroupNorm`` whose parameters and input may have different dtypes, optionally followed by SiLU.

    Args:
        num_groups: number of groups.
        num_channels: number of channels, a multiple of ``num_groups``.
        eps: added to the variance.
        affine: create a weight and a bias.
        device: the device of the parameters.
        dtype: the dtype of the parameters.
        act: "" for none; "silu" or "swish".

    Raises:
        ArgumentValueError: for any other activation.
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        act: str = "",
    ) -> None:
        super().__init__(num_groups, num_channels, eps, affine, device, dtype)
        self.act = act.lower()
        if self.act not in ("", "silu", "swish"):
            raise ArgumentValueError(f"act={act!r} must be '', 'silu' or 'swish'.")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize a floating tensor of shape [N, num_channels, ...]; the output has its dtype."""
        weight: torch.Tensor = self.weight
        bias: torch.Tensor = self.bias
        x = input
        if self.affine and weight.dtype is not x.dtype:
            weight, bias, x = weight.float(), bias.float(), x.float()
        y = F.group_norm(x, self.num_groups, weight, bias, self.eps)
        return (F.silu(y) if self.act else y).to(input.dtype)

    def extra_repr(self) -> str:
        """Return the arguments as text."""
        return super().extra_repr() + (f", act={self.act}" if self.act else "")
