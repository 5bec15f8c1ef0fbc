"""What a step costs the host: Python and dispatch, by the number of tensors, on tensors of a few elements.

The tensors are so small that hardly any time goes to arithmetic. Every step has new gradients, as training has. The
clipped forms are ``clip_grad_norm_`` before torch's step, and ``max_grad_norm`` of ours.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from halfstep import optimizers

from .harness import Contender, Timing, add_common_arguments, interleave, pick_device, table, write_json

BASELINE = "torch"
ELEMENTS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser)
    parser.add_argument("--tensors", type=int, nargs="+", default=[1, 10, 100, 1600], metavar="N")


def run(args: argparse.Namespace) -> int:
    device = pick_device(args.device)
    limits = {"rounds": args.steps, "min_seconds": args.min_seconds, "max_seconds": args.max_seconds}
    everything: list[Timing] = []
    for count in args.tensors:
        timings = interleave(_contenders(count, device), device=device, baseline=BASELINE, **limits)
        print(f"\n{count} tensors\n{table(timings, BASELINE)}")
        everything += [Timing(f"{t.name}, {count}", t.seconds, t.ratio) for t in timings]
    if args.json:
        write_json(args.json, "host_time", device, {"device": device.type, **limits}, BASELINE, everything)
    return 0


def _contenders(count: int, device: torch.device) -> list[Contender]:
    def contender(name: str, make: Callable[[Any], torch.optim.Optimizer], clip: float | None = None) -> Contender:
        params = [nn.Parameter(torch.ones(ELEMENTS, device=device)) for _ in range(count)]
        optimizer = make(params)

        def step() -> None:
            if clip is not None:
                nn.utils.clip_grad_norm_(params, clip)
            optimizer.step()

        return Contender(name, step, partial(_new_gradients, params))

    return [
        contender("torch", lambda p: torch.optim.AdamW(p, fused=True)),
        contender("torch, clipped", lambda p: torch.optim.AdamW(p, fused=True), 1.0),
        contender("FusedAdam", lambda p: optimizers.FusedAdam(p, weight_decay=0.01)),
        contender("FusedAdam, clipped", lambda p: optimizers.FusedAdam(p, weight_decay=0.01, max_grad_norm=1.0)),
    ]


@contextmanager
def _new_gradients(params: list[nn.Parameter]) -> Iterator[None]:
    before = [param.grad for param in params]  # so that the new ones lie elsewhere
    for param in params:
        param.grad = torch.ones_like(param)
    del before
    yield
