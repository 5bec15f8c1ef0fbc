"""What Lightning Fabric adds to a step: its own bfloat16 autocast, and halfstep's O1 and O2 in it and without it."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from halfstep import amp

from .harness import Contender, add_common_arguments, interleave, pick_device, table, write_json

BASELINE = "O2 in a plain loop"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=64)


def run(args: argparse.Namespace) -> int:
    from lightning.fabric import Fabric

    from halfstep.integrations.lightning import HalfstepFabricPrecision

    device = pick_device(args.device)
    x, y = torch.randn(args.batch, args.width, device=device), torch.randint(args.width, (args.batch,), device=device)

    def problem() -> tuple[nn.Module, Any]:
        layers = [each for _ in range(args.layers) for each in (nn.Linear(args.width, args.width), nn.GELU())]
        model = nn.Sequential(*layers).to(device)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def plain(level: str) -> Contender:
        model, optimizer = problem()
        if level == "O2":
            amp.decorate(model, optimizer, level="O2", dtype="bfloat16")

        def step() -> None:
            with amp.auto_cast(level=level, dtype="bfloat16"):
                output = model(x)
            F.cross_entropy(output.float(), y).backward()
            optimizer.step()
            optimizer.zero_grad()

        return Contender(f"{level} in a plain loop", step)

    def in_fabric(name: str, precision: Any) -> Contender:
        own = isinstance(precision, str)
        fabric = Fabric(accelerator=device.type, devices=1, **{"precision" if own else "plugins": precision})
        model, optimizer = fabric.setup(*(problem() if own else precision.prepare(*problem())))

        def step() -> None:
            fabric.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()

        return Contender(name, step)

    contenders = [
        plain("O2"),
        in_fabric("O2 in Fabric", HalfstepFabricPrecision("O2", "bfloat16")),
        plain("O1"),
        in_fabric("O1 in Fabric", HalfstepFabricPrecision("O1", "bfloat16")),
        in_fabric("Fabric's bf16-mixed", "bf16-mixed"),
    ]
    limits = {"rounds": args.steps, "min_seconds": args.min_seconds, "max_seconds": args.max_seconds}
    timings = interleave(contenders, device=device, baseline=BASELINE, warm_up=3, **limits)
    print(table(timings, BASELINE))
    if args.json:
        settings = {"width": args.width, "layers": args.layers, "batch": args.batch, "device": device.type, **limits}
        write_json(args.json, "trainers", device, settings, BASELINE, timings)
    return 0
