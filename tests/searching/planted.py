"""Models with planted faults: modules that are right in fp32 and wrong in float16, at random places.

Each fault takes numbers of size 1 and gives numbers of size 1, so that its borders are safe: only what it computes
inside needs fp32. They were written before the search. Three were changed after its first runs, which had shown that
they were no faults, or more: a LayerNorm or a mean over places undid "variance" and "near equal", and "huge logits"
was wrong as soon as its input was rounded.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["FAULTS", "KINDS", "Chain", "Planted", "planted", "step"]


class Fault(nn.Module):
    """A function as a module, which computes in the dtype of its weight also behind a module in fp32."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.weight = name, nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return FAULTS[self.name](x.to(self.weight.dtype) * self.weight)


def _variance(x: torch.Tensor) -> torch.Tensor:
    shifted = x + 100.0
    mean = shifted.mean(-1, keepdim=True)
    variance = (shifted * shifted).mean(-1, keepdim=True) - mean * mean
    return ((shifted - mean) * (variance + 1e-2).rsqrt()).tanh()


def _huge_logits(x: torch.Tensor) -> torch.Tensor:
    return x + (8.0 * x + 5e4 + 5e4).softmax(-1)


def _long_sum(x: torch.Tensor) -> torch.Tensor:
    parts = x.abs() * 2e4 + 1e4
    return x * 2e4 * x.shape[-1] / parts.sum(-1, keepdim=True)


def _lost_eps(x: torch.Tensor) -> torch.Tensor:
    small = x * 1e-4
    return small / ((small * small).mean(-1, keepdim=True) + x.new_tensor(1e-10)).sqrt()


def _large_exp(x: torch.Tensor) -> torch.Tensor:
    powers = (x.clamp(-3.0, 3.0) + 12.0).exp()
    return x * powers / powers.mean(-1, keepdim=True)


def _near_equal(x: torch.Tensor) -> torch.Tensor:
    p, q = x.softmax(-1), (x * 1.001).softmax(-1)
    return x + 5e4 * (p + p) * (p.log() - q.log())


FAULTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "variance": _variance,
    "huge logits": _huge_logits,
    "long sum": _long_sum,
    "lost eps": _lost_eps,
    "large exp": _large_exp,
    "near equal": _near_equal,
}


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(F.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1)))


class Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.lstm(x)[0]


class Head(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.flatten(2).mean(-1) if x.dim() == 4 else x.mean(1))


def _cnn() -> list[nn.Module]:
    blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(4)]
    return [nn.Conv2d(8, 8, 3, padding=1), *blocks, Head(8)]


def _transformer() -> list[nn.Module]:
    parts = [(nn.LayerNorm(16), Attention(16), nn.Linear(16, 16), nn.GELU()) for _ in range(3)]
    return [nn.Linear(16, 16), *(each for part in parts for each in part), Head(16)]


def _lstm() -> list[nn.Module]:
    return [nn.Linear(16, 16), Recurrent(16), nn.LayerNorm(16), Recurrent(16), nn.Linear(16, 16), nn.Tanh(), Head(16)]


KINDS = {"cnn": (_cnn, (8, 8, 8)), "transformer": (_transformer, (6, 16)), "lstm": (_lstm, (6, 16))}


class Planted(NamedTuple):
    model: nn.Module
    batches: list[tuple[torch.Tensor, torch.Tensor]]
    faults: set[str]  # qualified names


def planted(kind: str, seed: int, count: int | None = None, batches: int = 16) -> Planted:
    """A model with ``count`` faults, or 1 to 4 by the seed, each of another sort, at places that the seed chooses."""
    torch.manual_seed(seed)
    chance = random.Random(seed)
    make, shape = KINDS[kind]
    parts = make()
    for name in chance.sample(sorted(FAULTS), chance.randint(1, 4) if count is None else count):
        parts.insert(chance.randint(1, len(parts) - 1), Fault(name))
    model = nn.Sequential(*parts)
    faults = {name for name, module in model.named_modules() if isinstance(module, Fault)}
    return Planted(model, [(torch.randn(16, *shape), torch.randint(5, (16,))) for _ in range(batches)], faults)


def step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class Chain(nn.Module):
    """Convolutions whose rounding errors add up: no single one is guilty."""

    def __init__(self, length: int = 100) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(4, 4, 3, padding=1, bias=False) for _ in range(length))
        for layer in self.layers:
            nn.init.dirac_(layer.weight)
            with torch.no_grad():
                layer.weight.mul_(1.0002)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x
