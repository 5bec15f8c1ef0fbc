"""SimpleNet: nine square linear layers with a mean squared error. A step in fp32 and in each kind of mixed precision.

It is the network of Paddle's AMP tutorial, where it is 8192 wide with a batch of 2048.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from halfstep import amp, optimizers

from .harness import Contender, add_common_arguments, interleave, pick_device, table, write_json

BASELINE = "torch.autocast, fused"
LEARNING_RATE = 1e-4

Make = Callable[..., torch.optim.Optimizer]
OPTIMIZERS: dict[str, tuple[Make, Make]] = {
    "sgd": (torch.optim.SGD, optimizers.FusedSGD),
    "adam": (torch.optim.AdamW, optimizers.FusedAdam),
}
"""torch's optimizer, which the baseline uses with ``fused=True``, and halfstep's with the same update."""


class SimpleNet(nn.Module):
    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(width, width, device=device) for _ in range(9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear in self.linears:
            x = linear(x)
        return x


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser)
    parser.add_argument("--width", type=int, help="default: 2048 on the CPU, 8192 on CUDA")
    parser.add_argument("--batch", type=int, help="default: 256 on the CPU, 2048 on CUDA")
    parser.add_argument(
        "--dtype", choices=["float16", "bfloat16"], help="default: bfloat16 on the CPU, float16 on CUDA"
    )
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="sgd", help="default: sgd")


def run(args: argparse.Namespace) -> int:
    device = pick_device(args.device)
    on_cuda = device.type == "cuda"
    width = args.width or (8192 if on_cuda else 2048)
    batch = args.batch or (2048 if on_cuda else 256)
    dtype_name = args.dtype or ("float16" if on_cuda else "bfloat16")
    dtype: torch.dtype = getattr(torch, dtype_name)
    limits = {"rounds": args.steps, "min_seconds": args.min_seconds, "max_seconds": args.max_seconds}
    entered = contenders(device, width, batch, dtype, args.optimizer)
    try:
        timings = interleave(entered, device=device, baseline=BASELINE, **limits)
        losses = {}
        for contender in entered:  # they have taken equally many steps
            with contender.around():
                losses[contender.name] = float(contender.step())  # type: ignore[arg-type]
    finally:
        amp.deactivate()
    print(
        f"SimpleNet, width {width}, batch {batch}, {args.optimizer}, {dtype_name} on {device.type}, "
        f"{torch.get_num_threads()} threads"
    )
    print(table(timings, BASELINE))
    print("losses at the end:", ", ".join(f"{name} {loss:.6f}" for name, loss in losses.items()))
    if args.json:
        shape = {"width": width, "batch": batch, "optimizer": args.optimizer}
        settings = {**shape, "dtype": dtype_name, "device": device.type, "losses": losses, **limits}
        write_json(args.json, "simplenet", device, settings, BASELINE, timings)
    return 0


def contenders(device: torch.device, width: int, batch: int, dtype: torch.dtype, optimizer: str) -> list[Contender]:
    """All have the same network and data. O1 casts in the whole process, so the other contenders disable casts."""
    torch.manual_seed(100)
    data = torch.rand(batch, width, device=device)
    label = torch.rand(batch, width, device=device)
    weights = SimpleNet(width, device).state_dict()
    theirs, ours = OPTIMIZERS[optimizer]

    def fresh(make: Make, kind: torch.dtype = torch.float32, **arguments: Any) -> Any:
        model = SimpleNet(width, device)
        model.load_state_dict(weights)
        model.to(kind)
        return model, make(model.parameters(), lr=LEARNING_RATE, **arguments)

    def level(name: str, make: Make) -> Callable[[], torch.Tensor]:
        return _level(name, *fresh(make), data, label, dtype)

    off = amp.disable_casts
    return [
        Contender("fp32", _plain(*fresh(theirs), data, label), off),
        Contender("torch.autocast", _autocast(*fresh(theirs), data, label, dtype), off),
        Contender(BASELINE, _autocast(*fresh(theirs, fused=True), data, label, dtype), off),
        Contender("pure 16-bit", _plain(*fresh(theirs, dtype), data.to(dtype), label.to(dtype)), off),
        Contender("halfstep O1", level("O1", theirs)),
        Contender("halfstep O2", level("O2", theirs), off),
        Contender("halfstep O3", level("O3", theirs), off),
        Contender("halfstep O1, fused", level("O1", ours)),
        Contender("halfstep O2, fused", level("O2", ours), off),
    ]


def _plain(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: torch.Tensor, label: torch.Tensor
) -> Callable[[], torch.Tensor]:
    def step() -> torch.Tensor:
        loss = F.mse_loss(model(data), label)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _autocast(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: torch.Tensor, label: torch.Tensor, dtype: torch.dtype
) -> Callable[[], torch.Tensor]:
    device = data.device.type
    scaler = torch.amp.GradScaler(device, enabled=dtype is torch.float16)

    def step() -> torch.Tensor:
        with torch.autocast(device, dtype):
            loss = F.mse_loss(model(data), label)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _level(
    level: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: torch.Tensor,
    label: torch.Tensor,
    dtype: torch.dtype,
) -> Callable[[], torch.Tensor]:
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, dtype=dtype, verbosity=0)

    def step() -> torch.Tensor:
        loss = F.mse_loss(model(data), label)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
