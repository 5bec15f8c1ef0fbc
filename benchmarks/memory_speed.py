"""The fused step on a CPU against the speed of memory: its time, divided by that of a copy of as many bytes.

A step with split masters and clipping reads and writes 28 bytes a parameter, without clipping 26. The copy is
``Tensor.copy_`` of a buffer of 14 bytes a parameter, so it reads and writes 28 as well. Not counted is that a copy with
ordinary stores fetches what it overwrites, another 14; a step overwrites what it has read. "clip" is the step of
``fused_step`` under a ``GradScaler``, "torch" its usual loop, "no clip" the optimizer alone.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from halfstep import optimizers
from halfstep.kernels import backend_for

from .fused_step import fused_step, torch_step
from .harness import Contender, Timing, add_common_arguments, interleave, table, write_json

Make = Callable[..., Any]

BASELINE = "copy"
BYTES = {"copy": 28, "clip": 28, "no clip": 26}
"""Bytes that Adam with split masters reads and writes for each parameter."""

PAIRS: dict[str, tuple[Make, Make]] = {
    "adam": (optimizers.FusedAdam, torch.optim.AdamW),
    "sgd": (partial(optimizers.FusedSGD, momentum=0.9), partial(torch.optim.SGD, momentum=0.9)),
    "adagrad": (optimizers.FusedAdagrad, torch.optim.Adagrad),
    "lamb": (optimizers.FusedLAMB, torch.optim.AdamW),
    "novograd": (optimizers.FusedNovoGrad, torch.optim.AdamW),
}
"""Ours, and torch's optimizer in the loop it is compared with."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser)
    parser.add_argument("--parameters", type=float, nargs="+", default=[20e6, 100e6], help="default: 2e7 1e8")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="default: 1 2")
    parser.add_argument("--small", type=int, nargs="*", default=[400, 1600], help="lists of tensors of 16 values")
    parser.add_argument("--optimizer", choices=PAIRS, default="adam", help="default: adam")


def run(args: argparse.Namespace) -> int:
    device = torch.device("cpu")
    limits = {"rounds": args.steps, "min_seconds": args.min_seconds, "max_seconds": args.max_seconds}
    split = backend_for(device) == "compiled"
    print(f"cpu, backend {backend_for(device)}")
    everything: list[Timing] = []
    make, of_torch = PAIRS[args.optimizer]
    before = torch.get_num_threads()
    try:
        for parameters in map(int, args.parameters):
            contenders = _contenders(parameters, make, of_torch)
            for threads in args.threads:
                torch.set_num_threads(threads)
                timings = interleave(contenders, device=device, baseline=BASELINE, **limits)
                print(f"\n{parameters / 1e6:g} million parameters, {threads} threads\n{table(timings, BASELINE)}")
                print("\n".join(_ratios(timings, parameters, split=args.optimizer == "adam" and split)))
                everything += [Timing(f"{t.name}, {parameters}, {threads}", t.seconds, t.ratio) for t in timings]
            del contenders
        for tensors in args.small:
            shapes = [(16,)] * tensors
            small = [Contender("torch", torch_step(shapes, device, of_torch)), Contender("clip", _clip(shapes, make))]
            timings = interleave(small, device=device, baseline="torch", **{**limits, "rounds": 10 * args.steps})
            print(f"\n{tensors} tensors of 16 values, {before} threads\n{table(timings, 'torch')}")
            everything += [Timing(f"{t.name}, {tensors}x16", t.seconds, t.ratio) for t in timings]
    finally:
        torch.set_num_threads(before)
    if args.json:
        settings = {
            "optimizer": args.optimizer,
            "parameters": args.parameters,
            "threads": args.threads,
            "small": args.small,
            **limits,
        }
        write_json(args.json, "memory_speed", device, settings, BASELINE, everything)
    return 0


def _contenders(parameters: int, make: Make, of_torch: Make) -> list[Contender]:
    shapes = [(parameters // 10,)] * 10
    source = torch.ones(14 * parameters, dtype=torch.uint8)
    target = torch.zeros_like(source)
    return [
        Contender("copy", lambda: target.copy_(source)),
        Contender("clip", _clip(shapes, make)),
        Contender("no clip", _no_clip(shapes, make)),
        Contender("torch", torch_step(shapes, torch.device("cpu"), of_torch)),
    ]


def _clip(shapes: list[tuple[int, ...]], make: Make) -> Callable[[], None]:
    return fused_step(shapes, torch.device("cpu"), make=make, master_weights=True)


def _no_clip(shapes: list[tuple[int, ...]], make: Make) -> Callable[[], object]:
    params = [nn.Parameter(torch.randn(shape).bfloat16()) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    step: Callable[[], object] = make(params, lr=1e-4, weight_decay=0.01, max_grad_norm=None, master_weights=True).step
    return step


def _ratios(timings: list[Timing], parameters: int, *, split: bool) -> list[str]:
    """GB/s of each contender that moves a known number of bytes, and its time, divided by that of the copy."""
    seconds = {timing.name: timing.seconds for timing in timings}
    lines = []
    for name, moved in BYTES.items() if split else ():
        ratio = statistics.median(
            BYTES["copy"] / moved * t / b for t, b in zip(seconds[name], seconds["copy"], strict=True)
        )
        speed = moved * parameters / statistics.median(seconds[name]) / 1e9
        lines.append(f"  {name}: {speed:.1f} GB/s, {ratio:.2f} of the time of a copy of as many bytes")
    ratio = statistics.median(t / b for t, b in zip(seconds["clip"], seconds["torch"], strict=True))
    return [*lines, f"  clip takes {ratio:.3f} of the time of torch's loop"]
