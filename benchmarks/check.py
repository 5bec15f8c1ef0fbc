"""What ``halfstep.check`` costs on a model of many small tensors, and what ``halfstep.watch`` adds to a step."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn

import halfstep
from halfstep import amp

from .harness import Contender, add_common_arguments, interleave, pick_device, table, write_json

BASELINE = "check, fp32, not stepped"
STEP = "a step of AdamW"
WIDTH = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser)
    parser.add_argument("--blocks", type=int, default=250, help="of a Linear and a LayerNorm, 4 tensors (default 250)")
    parser.add_argument("--every", type=int, default=100, help="of halfstep.watch (default 100)")


def run(args: argparse.Namespace) -> int:
    device = pick_device(args.device)
    limits = {"rounds": args.steps, "min_seconds": args.min_seconds, "max_seconds": args.max_seconds}
    print(f"{4 * args.blocks} tensors, {device.type}, {torch.get_num_threads()} threads")
    checks = [
        _check(BASELINE, *_problem(args.blocks, device)),
        _check("check, fp32", *_stepped(args.blocks, device)),
        _check("check, O2", *_level(args.blocks, device)),
        _check("check, bfloat16 without masters", *_stepped(args.blocks, device, torch.bfloat16)),
    ]
    timings = interleave(checks, device=device, baseline=BASELINE, warm_up=2, **limits)
    print(table(timings, BASELINE))
    _, plain = _stepped(args.blocks, device, torch.bfloat16)
    _, watched = _stepped(args.blocks, device, torch.bfloat16)
    watch = halfstep.watch(watched, every=args.every)
    steps = [_steps(STEP, plain, args.every), _steps(f"watched every {args.every}", watched, args.every)]
    around = interleave(steps, device=device, baseline=STEP, warm_up=1, **{**limits, "rounds": max(args.steps // 5, 1)})
    watch.remove()
    print(f"\n{args.every} steps\n{table(around, STEP)}")
    if args.json:
        settings = {"blocks": args.blocks, "every": args.every, "device": device.type, **limits}
        write_json(args.json, "check", device, settings, BASELINE, [*timings, *around])
    return 0


def _check(name: str, model: nn.Module, optimizer: Any) -> Contender:
    return Contender(name, lambda: halfstep.check(model, optimizer))


def _steps(name: str, optimizer: Any, count: int) -> Contender:
    def step() -> None:
        for _ in range(count):
            optimizer.step()

    return Contender(name, step)


def _problem(blocks: int, device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    block = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(blocks)]
    model = nn.ModuleList(block).to(device, dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-5)


def _stepped(blocks: int, device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    model, optimizer = _problem(blocks, device, dtype)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    return model, optimizer


def _level(blocks: int, device: torch.device) -> tuple[nn.Module, Any]:
    return amp.initialize(*_problem(blocks, device), opt_level="O2", dtype="bfloat16", verbosity=0)
