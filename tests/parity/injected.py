"""Five models of which any layer can compute the same with one known difference of rounding."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["MODELS", "Case", "cases"]


class Layer(nn.Module):
    """A layer with a plain way to compute, and one for each kind of difference."""

    ways: tuple[str, ...] = ()
    way = ""


def rounded(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16 if x.dtype == torch.float32 else torch.float8_e5m2).to(x.dtype)


class Linear(Layer):
    ways = ("fused", "order", "accumulation", "rounding", "eager 16 bits")

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.randn(outputs) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w, b, half = self.weight, self.bias, x.shape[-1] // 2
        if self.way == "fused":
            return x @ w.T + b
        if self.way == "order" and x.dtype == torch.float32:
            return x[..., :half] @ w[:, :half].T + x[..., half:] @ w[:, half:].T + b
        if self.way == "order":  # 16-bit products sum in fp32: the operands in another order
            at = torch.arange(x.shape[-1]).flip(0)
            return F.linear(x[..., at], w[:, at], b)
        if self.way == "accumulation" and x.dtype == torch.float32:
            return F.linear(x.double(), w.double(), b.double()).float()
        if self.way == "accumulation":
            parts = range(0, x.shape[-1], 4)
            total: Any = b
            for i in parts:
                total = total + x[..., i : i + 4] @ w[:, i : i + 4].T
            return total
        y = F.linear(x, w, b)
        if self.way == "rounding":
            return rounded(y)
        return F.linear(x.bfloat16(), w.bfloat16(), b.bfloat16()).to(x.dtype) if self.way else y


class Conv(Layer):
    ways = ("fused", "order", "rounding", "accumulation")

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs, 3, 3) / (9 * inputs) ** 0.5)
        self.bias = nn.Parameter(torch.randn(outputs) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w, b, half = self.weight, self.bias, x.shape[1] // 2
        if self.way == "fused":
            return F.conv2d(x, w, padding=1) + b[:, None, None]
        if self.way == "accumulation" and x.dtype == torch.float32:
            return F.conv2d(x.double(), w.double(), b.double(), padding=1).float()
        if self.way == ("order" if x.dtype == torch.float32 else "accumulation"):  # 16-bit parts are rounded
            return F.conv2d(x[:, :half], w[:, :half], b, padding=1) + F.conv2d(x[:, half:], w[:, half:], padding=1)
        if self.way == "order":
            return F.conv2d(x.flip(1), w.flip(1), b, padding=1)
        y = F.conv2d(x, w, b, padding=1)
        return rounded(y) if self.way == "rounding" else y


class Norm(Layer):
    """RMSNorm in fp32, as in LLaMA."""

    ways = ("eps", "eps value", "cast", "rounding", "order", "accumulation", "fused")

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + torch.randn(size) / 4)
        self.eps = 1e-5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "fused":
            return F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps).to(x.dtype)
        wide = x if self.way == "cast" else x.float()
        square, half = wide.pow(2), x.shape[-1] // 2
        if self.way == "order":
            var = (square[..., :half].sum(-1, True) + square[..., half:].sum(-1, True)) / x.shape[-1]
        elif self.way == "accumulation":
            var = square.double().mean(-1, keepdim=True).float()
        else:
            var = square.mean(-1, keepdim=True)
        if self.way == "eps":
            y = wide * (1 / (var.sqrt() + self.eps))
        else:
            y = wide * torch.rsqrt(var + (1e-6 if self.way == "eps value" else self.eps))
        if self.way == "rounding":
            y = rounded(y)
        return (y * self.weight.to(y.dtype)).to(x.dtype)


class Attention(Layer):
    ways = ("fused", "cast", "rounding")

    def __init__(self, size: int) -> None:
        super().__init__()
        self.qkv, self.out = Linear(size, 3 * size), Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        if self.way == "fused":
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
            wide = scores if self.way == "cast" else scores.float()
            e = (wide - wide.amax(-1, True)).exp()
            p = e / e.sum(-1, True)
            if self.way == "rounding":
                p = rounded(p.to(v.dtype))
            y = p.to(v.dtype) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class Cell(Layer):
    ways = ("fused", "rounding")

    def __init__(self, size: int) -> None:
        super().__init__()
        self.x, self.h = Linear(size, 4 * size), Linear(size, 4 * size)

    def forward(self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        i, f, g, o = (self.x(x) + self.h(h)).chunk(4, -1)
        kept, new = f.sigmoid() * c, i.sigmoid()
        c = torch.addcmul(kept, new, g.tanh()) if self.way == "fused" else kept + new * g.tanh()
        if self.way == "rounding":
            c = rounded(c)
        return o.sigmoid() * c.tanh(), c


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = Cell(16), Cell(16), Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for cell in (self.one, self.two):
            h = c = x.new_zeros(x.shape[0], 16)
            found = []
            for step in x.unbind(1):
                h, c = cell(step, h, c)
                found.append(h)
            x = torch.stack(found, 1)
        return self.head(x[:, -1])  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = Norm(32), Attention(32), Norm(32)
        self.mlp = nn.Sequential(Linear(32, 64), nn.GELU(), Linear(64, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def mlp() -> nn.Module:
    return nn.Sequential(Linear(32, 64), nn.ReLU(), Linear(64, 64), nn.Tanh(), Linear(64, 8))


def cnn() -> nn.Module:
    return nn.Sequential(
        *(Conv(4, 8), nn.ReLU(), Conv(8, 8), nn.MaxPool2d(2), Conv(8, 8), nn.ReLU()), nn.Flatten(), Linear(128, 8)
    )


def norms() -> nn.Module:
    return nn.Sequential(Norm(32), Linear(32, 32), Norm(32), nn.SiLU(), Linear(32, 32), Norm(32), Linear(32, 8))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP": (mlp, (16, 32)),
    "CNN": (cnn, (4, 4, 8, 8)),
    "transformer block": (lambda: nn.Sequential(Block(), Block()), (4, 8, 32)),
    "LSTM": (LSTM, (8, 6, 16)),
    "norms": (norms, (16, 32)),
}


class Case(NamedTuple):
    """Two models that differ in one layer, and what is true of it."""

    name: str
    plain: nn.Module
    other: nn.Module
    inputs: torch.Tensor
    place: str
    kind: str


KIND_OF = {"eps value": "eps", "eager 16 bits": "cast"}


def case(seed: int) -> Case | None:
    """Make a case; None if the difference changes no bit of the output."""
    chance = random.Random(seed)
    name = list(MODELS)[seed % len(MODELS)]
    dtype = chance.choice((torch.float32, torch.bfloat16))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        make, shape = MODELS[name]
        plain, x = make().to(dtype), torch.randn(shape).to(dtype)
        other = copy.deepcopy(plain)
        place, layer = chance.choice([(n, m) for n, m in other.named_modules() if isinstance(m, Layer)])
        layer.way = chance.choice(layer.ways)
        if torch.equal(plain(x), other(x)):
            return None
    way = f"{name} {str(dtype)[6:]} {place} {layer.way}"
    return Case(way, plain, other, x, place, KIND_OF.get(layer.way, layer.way))


def cases(count: int) -> Iterator[Case]:
    """The first cases by seed whose outputs differ."""
    return itertools.islice(filter(None, map(case, itertools.count())), count)
