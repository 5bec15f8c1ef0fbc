"""The fused step on a CPU against the speed of memory: state bytes moved a second, as a share of what a copy moves.

A step with split masters and clipping reads and writes 28 bytes a parameter, without clipping 26. The copy is
``Tensor.copy_`` of a buffer of 14 bytes a parameter, so it reads and writes 28 as well; both are counted without what
the caches fetch in order to write. torch's usual loop is that of ``fused_step``.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import nn

from halfstep import optimizers
from halfstep.kernels import backend_for

from .fused_step import fused_step, torch_step
from .harness import Contender, Timing, add_common_arguments, interleave, table, write_json

BASELINE = "copy"
BYTES = {"copy": 28, "clip": 28, "no clip": 26}
"""Bytes that are read and written for each parameter."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser)
    parser.add_argument("--parameters", type=float, nargs="+", default=[20e6, 100e6], help="default: 2e7 1e8")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="default: 1 2")
    parser.add_argument("--small", type=int, nargs="*", default=[400, 1600], help="lists of tensors of 16 values")
    parser.add_argument("--no-torch", action="store_true", help="leave out torch's loop")


def run(args: argparse.Namespace) -> int:
    device = torch.device("cpu")
    limits = {"rounds": args.steps, "min_seconds": args.min_seconds, "max_seconds": args.max_seconds}
    print(f"cpu, backend {backend_for(device)}")
    everything: list[Timing] = []
    before = torch.get_num_threads()
    try:
        for parameters in map(int, args.parameters):
            contenders = _contenders(parameters, with_torch=not args.no_torch)
            for threads in args.threads:
                torch.set_num_threads(threads)
                timings = interleave(contenders, device=device, baseline=BASELINE, **limits)
                print(f"\n{parameters / 1e6:g} million parameters, {threads} threads\n{table(timings, BASELINE)}")
                print("\n".join(_shares(timings, parameters)))
                everything += [Timing(f"{t.name}, {parameters}, {threads}", t.seconds, t.ratio) for t in timings]
            del contenders
        for tensors in args.small:
            shapes = [(16,)] * tensors
            small = [Contender("torch", torch_step(shapes, device)), Contender("clip", _clip(shapes))]
            timings = interleave(small, device=device, baseline="torch", **{**limits, "rounds": 10 * args.steps})
            print(f"\n{tensors} tensors of 16 values, {before} threads\n{table(timings, 'torch')}")
            everything += [Timing(f"{t.name}, {tensors}x16", t.seconds, t.ratio) for t in timings]
    finally:
        torch.set_num_threads(before)
    if args.json:
        settings = {"parameters": args.parameters, "threads": args.threads, "small": args.small, **limits}
        write_json(args.json, "memory_speed", device, settings, BASELINE, everything)
    return 0


def _contenders(parameters: int, *, with_torch: bool) -> list[Contender]:
    shapes = [(parameters // 10,)] * 10
    source = torch.ones(14 * parameters, dtype=torch.uint8)
    target = torch.zeros_like(source)
    contenders = [
        Contender("copy", lambda: target.copy_(source)),
        Contender("clip", _clip(shapes)),
        Contender("no clip", _no_clip(shapes)),
    ]
    if with_torch:
        contenders.append(Contender("torch", torch_step(shapes, torch.device("cpu"))))
    return contenders


def _clip(shapes: list[tuple[int, ...]]) -> Callable[[], None]:
    return fused_step(shapes, torch.device("cpu"), master_weights=True)


def _no_clip(shapes: list[tuple[int, ...]]) -> Callable[[], object]:
    params = [nn.Parameter(torch.randn(shape).bfloat16()) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    return optimizers.FusedAdam(params, lr=1e-4, weight_decay=0.01, master_weights=True).step


def _shares(timings: list[Timing], parameters: int) -> list[str]:
    """The speed of each contender that moves a known number of bytes, and the median of its share in each round."""
    seconds = {timing.name: timing.seconds for timing in timings}
    lines = []
    for name, moved in BYTES.items():
        share = statistics.median(
            moved / BYTES["copy"] * b / t for t, b in zip(seconds[name], seconds["copy"], strict=True)
        )
        speed = moved * parameters / statistics.median(seconds[name]) / 1e9
        lines.append(f"  {name}: {speed:.1f} GB/s, {share:.2f} of the copy's speed")
    if "torch" in seconds:
        ratio = statistics.median(t / b for t, b in zip(seconds["clip"], seconds["torch"], strict=True))
        lines.append(f"  clip takes {ratio:.3f} of the time of torch's loop")
    return lines
