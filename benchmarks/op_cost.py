"""What op casting adds to an op, in microseconds, and to a transformer block, against ``torch.autocast``.

An op is called on small tensors, many times in a step, so that the time is the time of the host. The scope of each
step is entered outside of the timed part.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from halfstep import OpLists, amp
from halfstep.casting.scope import OpCasting
from halfstep.core.dtypes import default_half

from .harness import Contender, Timing, add_common_arguments, interleave, pick_device, table, write_json

CALLS = 200
BASELINE = "torch.autocast"

Scope = Callable[[], AbstractContextManager[object]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser)
    parser.add_argument("--no-compile", action="store_true", help="leave the compiled block out")


def run(args: argparse.Namespace) -> int:
    device = pick_device(args.device)
    half = default_half(device)
    limits = {"rounds": args.steps, "min_seconds": args.min_seconds, "max_seconds": args.max_seconds}
    scopes: dict[str, Scope] = {
        BASELINE: partial(torch.autocast, device.type, half),
        "torch's lists": partial(OpCasting, half, OpLists.native()),
        "default lists": partial(amp.auto_cast, dtype=half),
        "custom lists": partial(amp.auto_cast, dtype=half, custom_black_list=["tanh"], custom_white_list=["gelu"]),
    }
    print(f"{half}, {device.type}, {torch.get_num_threads()} threads")
    everything: list[Timing] = []
    for name, call in _ops(device).items():
        timings = interleave(
            [Contender(scope, partial(_repeat, call), around) for scope, around in scopes.items()],
            device=device,
            baseline=BASELINE,
            **limits,
        )
        base = timings[0].median
        print(f"\n{name}: {1e6 * base / CALLS:.2f} us under {BASELINE}")
        for timing in timings[1:]:
            print(f"  {timing.name:<14} {1e6 * (timing.median - base) / CALLS:+.2f} us")
        everything += [Timing(f"{name}, {t.name}", [s / CALLS for s in t.seconds], t.ratio) for t in timings]
    for compiled in (False,) if args.no_compile else (False, True):
        timings = interleave(_blocks(device, scopes, compiled), device=device, baseline=BASELINE, **limits)
        title = "transformer block, hidden 256, forward and backward" + (", compiled" if compiled else "")
        print(f"\n{title}\n{table(timings, BASELINE)}")
        everything += [Timing(f"{title}, {t.name}", t.seconds, t.ratio) for t in timings]
    if args.json:
        write_json(args.json, "op_cost", device, {"calls": CALLS, **limits}, BASELINE, everything)
    return 0


def _repeat(call: Callable[[], object]) -> None:
    for _ in range(CALLS):
        call()


def _ops(device: torch.device) -> dict[str, Callable[[], object]]:
    x = torch.randn(4, 4, device=device)
    half = x.to(default_half(device))
    weight = nn.Parameter(torch.randn(4, 4, device=device))
    return {
        "relu, on no list": partial(torch.relu, half),
        "x + y, on no list": partial(torch.add, half, half),
        "linear, half list, fp32 weight": partial(F.linear, half, weight),
        "matmul, half list, fp32 inputs": partial(torch.matmul, x, x),
        "softmax, float list, 16-bit input": partial(torch.softmax, half, 1),
        "softmax, float list, fp32 input": partial(torch.softmax, x, 1),
        "cat, promoted": partial(torch.cat, [half, x]),
    }


def _blocks(device: torch.device, scopes: dict[str, Scope], compiled: bool) -> Sequence[Contender]:
    x = torch.randn(8, 64, 256, device=device)
    return [Contender(name, _block_step(x, scope, compiled)) for name, scope in scopes.items()]


def _block_step(x: torch.Tensor, scope: Scope, compiled: bool) -> Callable[[], None]:
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True, device=x.device)
    forward: Callable[[torch.Tensor], torch.Tensor] = torch.compile(block) if compiled else block

    def step() -> None:
        with scope():
            loss = forward(x).float().square().mean()
        loss.backward()
        block.zero_grad()

    return step
