"""What ``halfstep.numerics`` costs: ``Monitor``, ``op_table`` and ``compare_step``, against the plain step."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from halfstep import amp
from halfstep.diagnostics.numerics import compare_step, op_table
from halfstep.numerics import Monitor

from .harness import Contender, add_common_arguments, interleave, pick_device, table, write_json

BASELINE = "a plain step"
MONITORS: dict[str, dict[str, Any]] = {
    "Monitor, every step": {"every": 1},
    "Monitor, every step, outputs": {"every": 1, "tensors": ("output",)},
    "Monitor, every step, outputs and their gradients": {"every": 1, "tensors": ("output", "output_grad")},
    "Monitor, every 100th step": {"every": 100},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser)
    parser.add_argument("--width", type=int, default=256, help="of the transformer (default 256)")
    parser.add_argument("--blocks", type=int, default=4, help="of the transformer (default 4)")
    parser.add_argument("--tokens", type=int, default=512, help="in a batch (default 512)")
    parser.add_argument("--level", default="O1", help="opt level (default O1)")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16", help="at O1 to O3")


def run(args: argparse.Namespace) -> int:
    device = pick_device(args.device)
    limits = {"rounds": args.steps, "min_seconds": args.min_seconds, "max_seconds": args.max_seconds}
    print(f"{args.level} {args.dtype}, width {args.width}, {args.tokens} tokens, {device.type}")
    contenders = [
        Contender(BASELINE, _problem(args, device)[2]),
        Contender("the same again", _problem(args, device)[2]),
    ]
    for name, options in MONITORS.items():
        model, optimizer, step = _problem(args, device)
        Monitor(model, optimizer, **options).attach()
        contenders.append(Contender(name, step))
    model, _, step = _problem(args, device)
    contenders.append(Contender("op_table", lambda: op_table(step, model)))
    contenders.append(Contender("compare_step, which runs it twice", lambda: compare_step(step, model)))
    timings = interleave(contenders, device=device, baseline=BASELINE, warm_up=2, **limits)
    print(table(timings, BASELINE))
    if args.json:
        settings = {name: getattr(args, name) for name in ("width", "blocks", "tokens", "level", "dtype")}
        write_json(args.json, "numerics", device, {**settings, "device": device.type}, BASELINE, timings)
    return 0


def _problem(args: argparse.Namespace, device: torch.device) -> tuple[nn.Module, Any, Callable[[], None]]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(args.width, 4, 4 * args.width, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, args.blocks, enable_nested_tensor=False).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.level, dtype=args.dtype, verbosity=0)
    batch = torch.randn(args.tokens // 64, 64, args.width, device=device)

    def step() -> None:
        with amp.scale_loss(F.mse_loss(model(batch).float(), batch), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step
