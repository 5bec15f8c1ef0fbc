"""SimpleNet: nine square linear layers, mean squared error, SGD; a step of fp32 and of each way to halve its bits.

It is the network of Paddle's AMP tutorial, there 8192 wide with a batch of 2048.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from halfstep import amp

from .harness import Contender, add_common_arguments, interleave, pick_device, table, write_json

BASELINE = "torch.autocast"
LEARNING_RATE = 1e-4


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


def run(args: argparse.Namespace) -> int:
    device = pick_device(args.device)
    on_cuda = device.type == "cuda"
    width = args.width or (8192 if on_cuda else 2048)
    batch = args.batch or (2048 if on_cuda else 256)
    dtype_name = args.dtype or ("float16" if on_cuda else "bfloat16")
    dtype: torch.dtype = getattr(torch, dtype_name)
    limits = {"rounds": args.steps, "min_seconds": args.min_seconds, "max_seconds": args.max_seconds}
    try:
        timings = interleave(contenders(device, width, batch, dtype), device=device, baseline=BASELINE, **limits)
    finally:
        amp.deactivate()
    print(f"SimpleNet, width {width}, batch {batch}, {dtype_name} on {device.type}, {torch.get_num_threads()} threads")
    print(table(timings, BASELINE))
    if args.json:
        settings = {"width": width, "batch": batch, "dtype": dtype_name, "device": device.type, **limits}
        write_json(args.json, "simplenet", device, settings, BASELINE, timings)
    return 0


def contenders(device: torch.device, width: int, batch: int, dtype: torch.dtype) -> list[Contender]:
    """The same network and data six times; halfstep's O1 casts for the whole process, so the others disable that."""
    torch.manual_seed(100)
    data = torch.rand(batch, width, device=device)
    label = torch.rand(batch, width, device=device)
    weights = SimpleNet(width, device).state_dict()
    return [
        Contender("fp32", _fp32(_model(weights, width, device), data, label), amp.disable_casts),
        Contender(BASELINE, _autocast(_model(weights, width, device), data, label, dtype), amp.disable_casts),
        Contender("pure 16-bit", _pure(_model(weights, width, device), data, label, dtype), amp.disable_casts),
        Contender("halfstep O1", _level("O1", _model(weights, width, device), data, label, dtype)),
        Contender("halfstep O2", _level("O2", _model(weights, width, device), data, label, dtype), amp.disable_casts),
        Contender("halfstep O3", _level("O3", _model(weights, width, device), data, label, dtype), amp.disable_casts),
    ]


def _model(weights: dict[str, torch.Tensor], width: int, device: torch.device) -> SimpleNet:
    model = SimpleNet(width, device)
    model.load_state_dict(weights)
    return model


def _sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def _fp32(model: nn.Module, data: torch.Tensor, label: torch.Tensor) -> Callable[[], None]:
    optimizer = _sgd(model)

    def step() -> None:
        F.mse_loss(model(data), label).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _autocast(model: nn.Module, data: torch.Tensor, label: torch.Tensor, dtype: torch.dtype) -> Callable[[], None]:
    optimizer = _sgd(model)
    device = data.device.type
    scaler = torch.amp.GradScaler(device, enabled=dtype is torch.float16)

    def step() -> None:
        with torch.autocast(device, dtype):
            loss = F.mse_loss(model(data), label)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def _pure(model: nn.Module, data: torch.Tensor, label: torch.Tensor, dtype: torch.dtype) -> Callable[[], None]:
    return _fp32(model.to(dtype), data.to(dtype), label.to(dtype))


def _level(
    level: str, model: nn.Module, data: torch.Tensor, label: torch.Tensor, dtype: torch.dtype
) -> Callable[[], None]:
    model, optimizer = amp.initialize(model, _sgd(model), opt_level=level, dtype=dtype, verbosity=0)

    def step() -> None:
        loss = F.mse_loss(model(data), label)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
