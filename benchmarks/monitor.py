"""What ``halfstep.numerics.Monitor`` adds to a training step: at every step, at every 100th, and gradients alone."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from halfstep import amp
from halfstep.numerics import Monitor

from .harness import Contender, add_common_arguments, interleave, pick_device, table, write_json

BASELINE = "a plain step"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser)
    parser.add_argument("--width", type=int, default=256, help="of the transformer (default 256)")
    parser.add_argument("--blocks", type=int, default=4, help="of the transformer (default 4)")
    parser.add_argument("--tokens", type=int, default=512, help="in a batch (default 512)")
    parser.add_argument("--level", default="O0", help="opt level (default O0)")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16", help="at O1 to O3")


def run(args: argparse.Namespace) -> int:
    device = pick_device(args.device)
    limits = {"rounds": args.steps, "min_seconds": args.min_seconds, "max_seconds": args.max_seconds}
    print(f"{args.level} {args.dtype}, width {args.width}, {args.tokens} tokens, {device.type}")
    kinds: dict[str, dict[str, Any] | None] = {
        BASELINE: None,
        "a plain step again": None,
        "every step": {"every": 1},
        "every step, without histograms": {"every": 1, "bins": False},
        "every step, outputs": {"every": 1, "tensors": ("output",)},
        "gradients in all steps": {"every": 1_000_000, "tensors": ("grad",)},
        "every 100th": {"every": 100},
    }
    contenders = [Contender(name, _step(args, device, options)) for name, options in kinds.items()]
    timings = interleave(contenders, device=device, baseline=BASELINE, warm_up=2, **limits)
    print(table(timings, BASELINE))
    if args.json:
        settings = {name: getattr(args, name) for name in ("width", "blocks", "tokens", "level", "dtype")}
        write_json(args.json, "monitor", device, {**settings, "device": device.type}, BASELINE, timings)
    return 0


def _step(args: argparse.Namespace, device: torch.device, options: dict[str, Any] | None) -> Callable[[], None]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(args.width, 4, 4 * args.width, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, args.blocks, enable_nested_tensor=False).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.level, dtype=args.dtype, verbosity=0)
    if options is not None:
        Monitor(model, optimizer, **options).attach()
    batch = torch.randn(args.tokens // 64, 64, args.width, device=device)

    def step() -> None:
        loss = model(batch).float().square().mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
