"""Two cases that users of torch and TRL reported, with halfstep in the same run.

pytorch/pytorch#146508 has square 16-bit products on CPUs without 16-bit units, at 500, 1000 and 2000 rows. Hide the
units of a CPU with ``ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2``. huggingface/trl#3910 has the loss of a model
that trains with bfloat16 weights and no fp32 masters. Here the model is small and is trained from the start.
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import nullcontext
from functools import partial

import torch
from torch import nn

from halfstep import amp, optimizers
from halfstep.core.hardware import has_units

from .eight_bit import CharModel, batches
from .harness import Contender, Timing, add_common_arguments, interleave, pick_device, write_json

BASELINE = "fp32"
RUNS = {"fp32": None, "fp32 weights, torch.autocast": None, "bf16 weights": None, "halfstep O2, 2-byte masters": "O2"}
"""Ways to train, with their level of ``amp.initialize``."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser)
    parser.add_argument("--sizes", type=int, nargs="*", default=[500, 1000, 2000], help="rows of the square matrices")
    parser.add_argument("--training-steps", type=int, default=2000, help="of each run (default 2000); 0 for no runs")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind (default 3)")
    parser.add_argument("--lr", type=float, default=1e-4, help="of AdamW (default 1e-4)")


def run(args: argparse.Namespace) -> int:
    device = pick_device(args.device)
    limits = {"rounds": args.steps, "min_seconds": args.min_seconds, "max_seconds": args.max_seconds}
    units = [str(dtype) for dtype in (torch.bfloat16, torch.float16) if has_units(device, dtype, "product")]
    print(f"{device.type}, {torch.get_num_threads()} threads, units for products: {', '.join(units) or 'none'}")
    print("\nProducts of square matrices: median time divided by fp32's in the same round\n")
    everything: list[Timing] = []
    for size in args.sizes:
        timings = interleave(_products(size, device), device=device, baseline=BASELINE, warm_up=1, **limits)
        ratios = ", ".join(f"{timing.name} {timing.ratio:.2f}" for timing in timings[1:])
        print(f"{size} x {size}: fp32 {1e3 * timings[0].median:.1f} ms; {ratios}", flush=True)
        everything += [Timing(f"{size}, {timing.name}", timing.seconds, timing.ratio) for timing in timings]
    losses: dict[str, list[float]] = {}
    if args.training_steps:
        print(f"\nLoss of a small language model, AdamW with lr={args.lr:g}, median of {args.seeds} seeds\n")
        for name in RUNS:
            losses[name] = [_loss(name, seed, args.training_steps, args.lr, device) for seed in range(args.seeds)]
            print(f"{name}: {statistics.median(losses[name]):.3f}", flush=True)
    if args.json:
        write_json(args.json, "reported", device, {**limits, "losses": losses}, BASELINE, everything)
    return 0


def _products(size: int, device: torch.device) -> list[Contender]:
    """Return fp32, and torch's and halfstep's product of 16-bit matrices [size, size]."""
    torch.manual_seed(0)
    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    contenders = [Contender(BASELINE, partial(torch.mm, a, b))]
    for name in ("bfloat16", "float16"):
        dtype = getattr(torch, name)
        x, y = a.to(dtype), b.to(dtype)
        contenders.append(Contender(f"{name} torch", partial(torch.mm, x, y)))
        contenders.append(Contender(f"{name} halfstep", partial(_emulated, x, y)))
    return contenders


def _emulated(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with amp.auto_cast(dtype=x.dtype):
        return torch.mm(x, y)


def _loss(name: str, seed: int, steps: int, lr: float, device: torch.device) -> float:
    """Return the mean loss over the last tenth of a run."""
    torch.manual_seed(seed)
    model = CharModel().to(device, torch.bfloat16 if name == "bf16 weights" else None)
    optimizer: torch.optim.Optimizer = (optimizers.FusedAdam if RUNS[name] else torch.optim.AdamW)(
        model.parameters(), lr=lr, weight_decay=0.0
    )
    if RUNS[name]:
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2", dtype="bfloat16", verbosity=0)
    casts = torch.autocast(device.type, torch.bfloat16, enabled="autocast" in name)
    losses = []
    for batch in batches(seed, steps, device):
        with casts:
            loss = nn.functional.cross_entropy(model(batch[:, :-1]).float(), batch[:, -1])
        with amp.scale_loss(loss, optimizer) if RUNS[name] else nullcontext(loss) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return float(torch.stack(losses[-max(steps // 10, 1) :]).mean())
