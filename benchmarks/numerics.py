"""What one look costs: ``halfstep.numerics.op_table`` and ``compare_step`` of a step, against the plain step."""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import nn

from halfstep import amp
from halfstep.numerics import compare_step, op_table

from .harness import Contender, add_common_arguments, interleave, pick_device, table, write_json

BASELINE = "a plain step"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser)
    parser.add_argument("--width", type=int, default=256, help="of the transformer (default 256)")
    parser.add_argument("--blocks", type=int, default=4, help="of the transformer (default 4)")
    parser.add_argument("--tokens", type=int, default=512, help="in a batch (default 512)")
    parser.add_argument("--level", choices=["O0", "O1"], default="O1", help="opt level (default O1)")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16", help="at O1")


def run(args: argparse.Namespace) -> int:
    device = pick_device(args.device)
    limits = {"rounds": args.steps, "min_seconds": args.min_seconds, "max_seconds": args.max_seconds}
    print(f"{args.level} {args.dtype}, width {args.width}, {args.tokens} tokens, {device.type}")
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(args.width, 4, 4 * args.width, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, args.blocks, enable_nested_tensor=False).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = torch.randn(args.tokens // 64, 64, args.width, device=device)

    def forward() -> torch.Tensor:
        with amp.auto_cast(enable=args.level == "O1", dtype=args.dtype):
            return F.mse_loss(model(batch), batch)

    def step() -> None:
        forward().backward()
        optimizer.step()
        optimizer.zero_grad()

    contenders = [
        Contender(BASELINE, step),
        Contender("op_table", lambda: op_table(step, model)),
        Contender("compare_step, which runs it twice", lambda: compare_step(forward, model)),
    ]
    timings = interleave(contenders, device=device, baseline=BASELINE, warm_up=2, **limits)
    print(table(timings, BASELINE))
    if args.json:
        settings = {name: getattr(args, name) for name in ("width", "blocks", "tokens", "level", "dtype")}
        write_json(args.json, "numerics", device, {**settings, "device": device.type}, BASELINE, timings)
    return 0
