"""A step of Muon on the matrices of a transformer: torch's, and the fused one in fp32 and with split masters.

A layer of width w has weights of 3w x w, w x w, 4w x w and w x 4w. The time is that of the step alone. The angle is
that between the first updates of torch's Muon and of the fused one, in radians.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn

from halfstep import optimizers
from halfstep.optimizers.newton_schulz import product_dtype

from .harness import Contender, add_common_arguments, interleave, pick_device, table, write_json

BASELINE = "torch.optim.Muon"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser)
    parser.add_argument("--layers", type=int, default=12, help="of the transformer (default 12)")
    parser.add_argument("--width", type=int, default=512, help="of a layer (default 512)")


def run(args: argparse.Namespace) -> int:
    device = pick_device(args.device)
    made = {
        BASELINE: torch.optim.Muon(_weights(args, device), lr=1e-3),
        "FusedMuon": optimizers.FusedMuon(_weights(args, device), lr=1e-3, use_muon=True),
        "FusedMuon, split masters": optimizers.FusedMuon(
            _weights(args, device, torch.bfloat16), lr=1e-3, use_muon=True, master_weights="split"
        ),
    }
    params = {name: optimizer.param_groups[0]["params"] for name, optimizer in made.items()}
    before = {name: [p.detach().float().clone() for p in mine] for name, mine in params.items()}
    for optimizer in made.values():
        optimizer.step()
    wanted, found = (_moved(params[name], before[name]) for name in list(made)[:2])
    angle = float(torch.cosine_similarity(wanted, found, dim=0).clamp(max=1).acos())
    contenders = [Contender(name, optimizer.step) for name, optimizer in made.items()]
    limits: dict[str, Any] = {"rounds": args.steps, "min_seconds": args.min_seconds, "max_seconds": args.max_seconds}
    timings = interleave(contenders, device=device, baseline=BASELINE, **limits)
    products = str(product_dtype(params[BASELINE][0], None)).removeprefix("torch.")
    print(f"products in {products}; angle between the updates of FusedMuon and torch.optim.Muon: {angle:.4f}")
    print(table(timings, BASELINE))
    if args.json:
        settings = {"layers": args.layers, "width": args.width, "products": products, "angle": angle, **limits}
        write_json(args.json, "muon", device, settings, BASELINE, timings)
    return 0


def _weights(args: argparse.Namespace, device: torch.device, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    shapes = [(3, 1), (1, 1), (4, 1), (1, 4)] * args.layers
    made = [torch.randn(rows * args.width, columns * args.width, device=device) for rows, columns in shapes]
    params = [nn.Parameter((0.02 * weight).to(dtype)) for weight in made]
    for param, weight in zip(params, made, strict=True):
        param.grad = weight.to(dtype)
    return params


def _moved(params: list[nn.Parameter], before: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([(p.detach().double() - b).flatten() for p, b in zip(params, before, strict=True)])
