"""``TrainStep`` on two small models: a step of torch's usual loop, of that loop compiled, and of ``TrainStep``.

The models are three linear layers and a transformer block, both 256 wide. The usual loop has ``AdamW(fused=True)``, in
fp32 and under torch.autocast, which is the baseline and has a ``GradScaler`` in float16. ``TrainStep`` is at O2 with
``FusedAdam``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from halfstep import TrainStep, amp, optimizers

from .harness import Contender, Timing, add_common_arguments, interleave, pick_device, table, write_json

BASELINE = "torch.autocast, eager"
WIDTH = 256
LEARNING_RATE = 1e-3


def _mlp(device: torch.device) -> tuple[nn.Module, torch.Tensor]:
    layers = [nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*layers).to(device), torch.randn(64, WIDTH, device=device)


def _transformer(device: torch.device) -> tuple[nn.Module, torch.Tensor]:
    block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
    return block.to(device), torch.randn(8, 64, WIDTH, device=device)


MODELS = {"mlp": _mlp, "transformer block": _transformer}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="bfloat16", help="default: bfloat16")


def run(args: argparse.Namespace) -> int:
    device = pick_device(args.device)
    dtype: torch.dtype = getattr(torch, args.dtype)
    limits = {"rounds": args.steps, "min_seconds": args.min_seconds, "max_seconds": args.max_seconds}
    everything: list[Timing] = []
    for name in args.models:
        timings = interleave(contenders(name, device, dtype), device=device, baseline=BASELINE, warm_up=8, **limits)
        print(f"\n{name}, {args.dtype} on {device.type}, {torch.get_num_threads()} threads\n{table(timings, BASELINE)}")
        everything += [Timing(f"{t.name}, {name}", t.seconds, t.ratio) for t in timings]
    if args.json:
        settings = {"dtype": args.dtype, "device": device.type, **limits}
        write_json(args.json, "train_step", device, settings, BASELINE, everything)
    return 0


def contenders(name: str, device: torch.device, dtype: torch.dtype) -> list[Contender]:
    """The same model and batch for each."""
    torch.manual_seed(0)
    model, batch = MODELS[name](device)
    weights, target = model.state_dict(), torch.randn_like(batch)

    def fresh() -> nn.Module:
        again = MODELS[name](device)[0]
        again.load_state_dict(weights)
        return again

    ways: dict[str, dict[str, Any]] = {"TrainStep, eager": {}, "TrainStep, compiled": {"compiled": True}}
    if device.type == "cuda":
        ways |= {
            "TrainStep, CUDA graph": {"cuda_graph": True},
            "TrainStep, compiled, CUDA graph": {"compiled": True, "cuda_graph": True},
        }
    return [
        Contender(BASELINE, _loop(fresh(), batch, target, dtype)),
        Contender("fp32, eager", _loop(fresh(), batch, target, torch.float32)),
        Contender("torch.autocast, torch.compile", _loop(fresh(), batch, target, dtype, compiled=True)),
        *(Contender(way, _train_step(fresh(), batch, target, dtype, **options)) for way, options in ways.items()),
    ]


def _loop(
    model: nn.Module, batch: torch.Tensor, target: torch.Tensor, dtype: torch.dtype, *, compiled: bool = False
) -> Callable[[], None]:
    device = batch.device.type
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    scaler = torch.amp.GradScaler(device, enabled=dtype is torch.float16)
    forward: Any = torch.compile(model) if compiled else model

    def step() -> None:
        with torch.autocast(device, dtype, enabled=dtype is not torch.float32):
            loss = F.mse_loss(forward(batch).float(), target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def _train_step(
    model: Any, batch: torch.Tensor, target: torch.Tensor, dtype: torch.dtype, **options: bool
) -> Callable[[], None]:
    optimizer: Any = optimizers.FusedAdam(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", dtype=dtype, verbosity=0)
    step = TrainStep(model, F.mse_loss, optimizer, **options)  # type: ignore[arg-type]
    return lambda: step(batch, target)
