"""A training step as one captured graph with casts, against eager ``torch.autocast`` and ``torch.compile`` under it.

SimpleNet is nine linear layers; the block is one pre-norm transformer block. A turn is several steps, because
the first step finds the caches and the allocator as another contender left them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from halfstep import optimizers, static
from halfstep.core.dtypes import default_half, dtype_name, parse_dtype

from .harness import Contender, Timing, add_common_arguments, interleave, pick_device, table, write_json

BASELINE = "autocast"


class SimpleNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(width, width) for _ in range(9)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear in self.linears:
            x = linear(x)
        return x


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        y = self.norms[0](x)
        q, k, v = (f(y).view(b, t, self.heads, d // self.heads).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=256, help="rows of SimpleNet's input; tokens of the block's")
    parser.add_argument("--turn", type=int, default=8, help="steps in a turn (default 8)")
    parser.add_argument("--dtype", choices=["float16", "bfloat16"])


def run(args: argparse.Namespace) -> int:
    device = pick_device(args.device)
    half = parse_dtype(args.dtype) if args.dtype else default_half(device)
    limits = {"rounds": args.steps, "min_seconds": args.min_seconds, "max_seconds": args.max_seconds}
    everything: list[Timing] = []
    for name, make, shape in (
        ("SimpleNet", SimpleNet, (args.batch, args.width)),
        ("block", Block, (max(1, args.batch // 64), 64, args.width)),
    ):
        x, y = (torch.randn(shape, device=device) for _ in range(2))
        contenders = [
            Contender(BASELINE, _eager(make(args.width).to(device), x, y, half, compiled=False)),
            Contender("autocast, compiled", _eager(make(args.width).to(device), x, y, half, compiled=True)),
            Contender("graph O1", _graph(make(args.width).to(device), x, y, half, compiled=False)),
            Contender("graph O1, compiled", _graph(make(args.width).to(device), x, y, half, compiled=True)),
            Contender(
                "graph O2, FusedSGD", _graph(make(args.width).to(device), x, y, half, compiled=False, level="O2")
            ),
        ]
        contenders = [Contender(c.name, _several(c.step, args.turn)) for c in contenders]
        timings = interleave(contenders, device=device, baseline=BASELINE, **limits)
        print(f"\n{name}, {shape}, {dtype_name(half)} on {device.type}\n{table(timings, BASELINE)}")
        everything += [Timing(f"{name}, {t.name}", t.seconds, t.ratio) for t in timings]
    if args.json:
        settings = {"width": args.width, "batch": args.batch, "dtype": dtype_name(half), **limits}
        write_json(args.json, "graph", device, settings, BASELINE, everything)
    return 0


def _several(step: Callable[[], None], count: int) -> Callable[[], None]:
    def steps() -> None:
        for _ in range(count):
            step()

    return steps


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def _eager(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, half: torch.dtype, *, compiled: bool
) -> Callable[[], None]:
    optimizer = _optimizer(model)
    scaler = torch.amp.GradScaler(x.device.type, enabled=half is torch.float16)
    forward: Any = torch.compile(model) if compiled else model

    def step() -> None:
        with torch.autocast(x.device.type, half):
            loss = F.mse_loss(forward(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def _graph(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, half: torch.dtype, *, compiled: bool, level: str = "O1"
) -> Callable[[], None]:
    program = static.capture(model, nn.MSELoss(), (x, y))
    optimizer = _optimizer(model) if level == "O1" else optimizers.FusedSGD(model.parameters(), lr=1e-3)
    static.amp.decorate(optimizer, level=level, dtype=dtype_name(half)).minimize(program.loss)
    executor = static.Executor(x.device, compiled=compiled)
    feed = dict(zip(program.feed_names, (x, y), strict=True))

    def step() -> None:
        executor.run(program, feed)

    return step
