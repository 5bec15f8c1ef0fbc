"""A small model of layers in 16 bits, as ``FP16_Optimizer`` takes it, and its loss."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.support.apex_recording import grid

DTYPES = {
    "fp16": (torch.float16, torch.float16, torch.float16),
    "bf16": (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "mixed": (torch.float16, torch.float32, torch.bfloat16),
}
DYNAMIC = {"init_scale": 2.0**10, "scale_window": 4}


class Layers(nn.Module):
    """Three linear layers that compute in the dtypes of their own weights."""

    def __init__(self, dtypes: tuple[torch.dtype, ...]) -> None:
        super().__init__()
        sizes = (6, 12, 12, 3)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        with torch.no_grad():
            for k, param in enumerate(self.parameters()):
                # Numbers that all formats hold, so that every run starts at the same point.
                param.copy_(grid(tuple(param.shape), 7 * k, 0.5).bfloat16().half())
        for layer, dtype in zip(self.layers, dtypes, strict=True):
            layer.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x.to(layer.weight.dtype))
            x = torch.tanh(x) if i < 2 else x
        return x


def loss_of(model: nn.Module, t: int) -> torch.Tensor:
    return F.mse_loss(model(grid((16, 6), 300 + 11 * t)).float(), grid((16, 3), 500 + 5 * t))


def values(params: Any) -> torch.Tensor:
    return torch.cat([p.detach().float().flatten() for p in params])
