"""Five small models, each with a batch and a loss: what faults are put into."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["MODELS", "Trial"]


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = [3, 8, 16, 16]
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in itertools.pairwise(widths)
        )
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = F.max_pool2d(block(x), 2)
        return self.head(x.flatten(2).mean(-1))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, 4)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(Block(32) for _ in range(2))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 10)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class Recurrent(nn.Module):
    """An LSTM by hand, over eight steps."""

    def __init__(self) -> None:
        super().__init__()
        self.input = nn.Linear(16, 128)
        self.hidden = nn.Linear(32, 128)
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = c = x.new_zeros(x.shape[0], 32)
        for part in x.unbind(1):
            i, f, g, o = (self.input(part) + self.hidden(h)).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return self.head(h)


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 32)
        self.norms = nn.ModuleList(RMSNorm(32) for _ in range(3))
        self.ups = nn.ModuleList(nn.Linear(32, 64) for _ in range(3))
        self.downs = nn.ModuleList(nn.Linear(64, 32) for _ in range(3))
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = x + down(F.silu(up(norm(x))))
        return self.head(x)


class Trial:
    """A model, and a step that returns its loss.

    Args:
        build: makes the model.
        batch: makes its input.
    """

    def __init__(self, build: Callable[[], nn.Module], batch: Callable[[], torch.Tensor]) -> None:
        self.model = build()
        self._x, self._y = batch(), torch.randint(10, (16,))
        self.extra: list[torch.Tensor] = []

    def step(self) -> torch.Tensor:
        self.extra.clear()
        loss = F.cross_entropy(self.model(self._x), self._y)
        return loss + sum(self.extra) if self.extra else loss


MODELS: dict[str, Callable[[], Trial]] = {
    "mlp": lambda: Trial(MLP, lambda: torch.randn(16, 32)),
    "convnet": lambda: Trial(ConvNet, lambda: torch.randn(16, 3, 16, 16)),
    "transformer": lambda: Trial(Transformer, lambda: torch.randint(50, (16, 12))),
    "recurrent": lambda: Trial(Recurrent, lambda: torch.randn(16, 8, 16)),
    "residual": lambda: Trial(Residual, lambda: torch.randn(16, 16)),
}
"""By name."""
