"""The table of Paddle's AMP guide, made here: SimpleNet in fp32, at O1 and at O2, its time, loss and memory.

The guide's figures stand beside: of a V100, 8192 wide, with a batch of 2048 (section 2.1.4).
"""

from __future__ import annotations

import argparse
import functools
import statistics
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F

from halfstep import amp

from .harness import add_common_arguments, pick_device, timed
from .simplenet import LEARNING_RATE, SimpleNet

PUBLISHED = {"float32": (0.529, 0.6486028), "O1": (0.118, 0.6486219), "O2": (0.102, 0.6743)}
"""Seconds a step, and the loss after 20 steps."""


@dataclass
class Run:
    """A network that trains at one level, and its times."""

    level: str
    model: Any
    optimizer: Any
    scaler: amp.GradScaler
    dtype: str
    seconds: list[float] = field(default_factory=list)
    loss: torch.Tensor = field(default_factory=lambda: torch.zeros(()))

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        level = "O0" if self.level == "float32" else self.level
        with amp.auto_cast(enable=level != "O0", level=level, dtype=self.dtype):
            loss = F.mse_loss(self.model(x), y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.loss = loss.detach()  # read once, in the end


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser)
    parser.add_argument("--width", type=int, help="default: 1024 on the CPU, 8192 on CUDA")
    parser.add_argument("--batch", type=int, help="default: 256 on the CPU, 2048 on CUDA")
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="float16", help="default: float16")


def run(args: argparse.Namespace) -> int:
    device = pick_device(args.device)
    width = args.width or (8192 if device.type == "cuda" else 1024)
    batch = args.batch or (2048 if device.type == "cuda" else 256)
    runs = [_run(level, width, device, args.dtype) for level in PUBLISHED]
    generator = torch.Generator().manual_seed(100)
    for _ in range(20):  # 2 epochs of 10 batches, as in the guide; the levels take turns
        x, y = (torch.rand(batch, width, generator=generator).to(device) for _ in range(2))
        for each in runs:
            each.seconds.append(timed(functools.partial(each.step, x, y), device))
    print(f"SimpleNet, {width} wide, {batch} rows, {args.dtype}, {device.type}; in brackets: the guide's, on a V100\n")
    print(f"{'':8} {'ms a step':>20} {'ratio to fp32':>16} {'loss':>24} {'weights and masters, MiB':>26}")
    base = statistics.median(runs[0].seconds[2:])
    for each in runs:
        taken, (seconds, loss) = statistics.median(each.seconds[2:]), PUBLISHED[each.level]
        print(
            f"{each.level:8} {1e3 * taken:10.1f} ({1e3 * seconds:5.0f})   {taken / base:8.2f} "
            f"({seconds / PUBLISHED['float32'][0]:.2f}) {float(each.loss):13.6f} ({loss:.4f}) {_held(each):22.1f}"
        )
    return 0


def _run(level: str, width: int, device: torch.device, dtype: str) -> Run:
    torch.manual_seed(100)
    model: Any = SimpleNet(width, device)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    if level == "O2":
        model, optimizer = amp.decorate(model, optimizer, level="O2", dtype=dtype)
    scaler = amp.GradScaler(enable=level != "float32", init_loss_scaling=1024.0)
    return Run(level, model, optimizer, scaler, dtype)


def _held(each: Run) -> float:
    state = (value for entry in each.optimizer.state.values() for value in entry.values())
    tensors = [*each.model.parameters(), *(value for value in state if isinstance(value, torch.Tensor))]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 2**20
