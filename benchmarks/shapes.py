"""When 16 bits are faster than fp32 and when not: products, convolutions, small ops and steps, by size and layout.

The contenders of a row take turns. A figure is the time of one, divided by that of the first of its row: fp32, and in
"alignment" the 16-bit product of aligned size.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from torch import nn
from torch.nn import functional as F

from halfstep import amp
from halfstep.core.dtypes import default_half, dtype_name

from .harness import Contender, Timing, add_common_arguments, interleave, pick_device, write_json

FP32, HALF = "fp32", "16 bits"
ALIGNED = 1024
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}

Call = Callable[[], object]
Rows = dict[str, dict[str, Call]]
"""The contenders of each row of a table; the first of a row is the baseline, the same in all rows."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser)
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], help="default: float16 on cuda, bfloat16 on cpu")
    parser.add_argument("--table", choices=TABLES, action="append", help="default: all of them")


def run(args: argparse.Namespace) -> int:
    device = pick_device(args.device)
    half = getattr(torch, args.dtype) if args.dtype else default_half(device)
    limits = {"rounds": args.steps, "min_seconds": args.min_seconds, "max_seconds": args.max_seconds}
    print(f"{dtype_name(half)} on {device.type}, {torch.get_num_threads()} threads")
    everything: list[Timing] = []
    for title in args.table or TABLES:
        torch.manual_seed(0)
        rows = TABLES[title](device, half)
        width = max(len(name) for name in rows)
        baseline = next(iter(next(iter(rows.values()))))
        print(f"\n{title}: times, divided by that of {baseline}")
        for row, calls in rows.items():
            contenders = [Contender(name, call) for name, call in calls.items()]
            timings = interleave(contenders, device=device, baseline=baseline, **limits)
            print(f"  {row:<{width}}  " + "  ".join(f"{t.name} {t.ratio:.2f}" for t in timings[1:]))
            everything += [Timing(f"{title}, {row}, {t.name}", t.seconds, t.ratio) for t in timings]
    if args.json:
        write_json(args.json, "shapes", device, {"dtype": dtype_name(half), **limits}, FP32, everything)
    return 0


def _sizes(device: torch.device, half: torch.dtype) -> Rows:
    """Square products. "with casts" is what op casting does: both operands are in fp32."""
    rows: Rows = {}
    for n in (16, 64, 256, 1024, 2048):
        a, b = torch.randn(2, n, n, device=device)
        x, y = a.to(half), b.to(half)
        calls = {FP32: partial(torch.mm, a, b), HALF: partial(torch.mm, x, y)}
        calls["with casts"] = partial(_cast_and_multiply, a, b, half)
        rows[f"{n} x {n} x {n}"] = {name: _repeated(call, 2**24 // n**3) for name, call in calls.items()}
    return rows


def _cast_and_multiply(a: torch.Tensor, b: torch.Tensor, half: torch.dtype) -> torch.Tensor:
    return a.to(half) @ b.to(half)


def _alignment(device: torch.device, half: torch.dtype) -> Rows:
    """``linear`` of 256 rows. The first column is the 16-bit product of aligned size, so 1 is as fast as that."""
    rows: Rows = {}
    aligned = partial(F.linear, *_operands(ALIGNED, device, half))
    for n in (1024, 1008, 1016, 1020, 1022, 1023, 1025):
        calls = {"aligned": aligned, HALF: partial(F.linear, *_operands(n, device, half))}
        calls[FP32] = partial(F.linear, *_operands(n, device, torch.float32))
        rows[f"256 x {n} x {n}"] = calls
    return rows


def _operands(n: int, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(256, n, device=device, dtype=dtype), torch.randn(n, n, device=device, dtype=dtype)


def _convolutions(device: torch.device, half: torch.dtype) -> Rows:
    """Forward and backward of a 3 x 3 convolution of 16 images of 32 x 32, by layout."""
    rows: Rows = {}
    for channels, out in ((3, 64), (4, 64), (61, 64), (64, 64), (256, 256)):
        calls: dict[str, Call] = {}
        for (layout, memory_format), dtype in product(LAYOUTS.items(), (torch.float32, half)):
            x = torch.randn(16, channels, 32, 32, device=device, dtype=dtype).to(memory_format=memory_format)
            x.requires_grad_()
            conv = nn.Conv2d(channels, out, 3, padding=1, device=device, dtype=dtype).to(memory_format=memory_format)
            calls[f"{FP32 if dtype is torch.float32 else HALF} {layout}"] = partial(_forward_backward, conv, x)
        rows[f"{channels} to {out} channels"] = calls
    return rows


def _forward_backward(module: nn.Module, x: torch.Tensor) -> None:
    y = module(x)
    y.backward(torch.ones_like(y))
    module.zero_grad()
    x.grad = None


def _elementwise(device: torch.device, half: torch.dtype) -> Rows:
    """Ops that move numbers and compute little."""
    rows: Rows = {}
    ops = {"add": lambda t: t + t, "gelu": F.gelu, "layer_norm": lambda t: F.layer_norm(t, t.shape[-1:])}
    for (name, op), (height, width) in product(ops.items(), ((32, 32), (4096, 4096))):
        x = torch.randn(height, width, device=device)
        y = x.to(half)
        calls: dict[str, Call] = {FP32: partial(op, x), HALF: partial(op, y)}
        calls["with casts"] = lambda op=op, x=x: op(x.to(half)).float()
        rows[f"{name}, {height} x {width}"] = {n: _repeated(c, 2**16 // x.numel()) for n, c in calls.items()}
    return rows


def _steps(device: torch.device, half: torch.dtype) -> Rows:
    """A step of AdamW on four layers, 128 rows, by width."""
    rows: Rows = {}
    for width in (32, 128, 512, 1024):
        calls = {level: _step(level, width, device, half) for level in ("O0", "O1", "O2")}
        rows[f"width {width}"] = {FP32 if level == "O0" else level: call for level, call in calls.items()}
    return rows


def _step(level: str, width: int, device: torch.device, half: torch.dtype) -> Call:
    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
    model: nn.Module = nn.Sequential(*layers).to(device)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if level == "O2":
        model, optimizer = amp.decorate(model, optimizer, level="O2", dtype=half)
    scaler = amp.GradScaler(enable=level != "O0" and half is torch.float16)
    x = torch.randn(128, width, device=device)

    def step() -> None:
        with amp.auto_cast(level=level, dtype=half):
            loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def _repeated(call: Call, times: int) -> Call:
    """A call that takes long enough to be timed."""

    def calls() -> None:
        for _ in range(times):
            call()

    return call if times <= 1 else calls


TABLES: dict[str, Callable[[torch.device, torch.dtype], Rows]] = {
    "sizes": _sizes,
    "alignment": _alignment,
    "convolutions": _convolutions,
    "elementwise": _elementwise,
    "steps": _steps,
}
