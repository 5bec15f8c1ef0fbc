"""Whether one flat fp32 master is faster than one for each parameter. No model runs.

A step copies 16-bit gradients to the masters, runs AdamW, and rounds the masters into the 16-bit parameters.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import nn

from halfstep.core.dtypes import default_half
from halfstep.fp16_utils import master_params_to_model_params, model_grads_to_master_grads, prep_param_lists

from .harness import Contender, Timing, add_common_arguments, interleave, pick_device, table, write_json

BASELINE = "plain, fused AdamW"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser)
    parser.add_argument(
        "--shapes",
        type=_shape,
        nargs="+",
        default=[(1000, 64), (1000, 4096), (100, 40960), (4, 1024000)],
        metavar="TENSORSxVALUES",
        help="default: 1000x64 1000x4096 100x40960 4x1024000",
    )


def run(args: argparse.Namespace) -> int:
    device = pick_device(args.device)
    limits = {"rounds": args.steps, "min_seconds": args.min_seconds, "max_seconds": args.max_seconds}
    print(f"{default_half(device)}, {device.type}, {torch.get_num_threads()} threads")
    everything: list[Timing] = []
    for tensors, values in args.shapes:
        timings = interleave(contenders(device, tensors, values), device=device, baseline=BASELINE, **limits)
        print(f"\n{tensors} tensors of {values} values\n{table(timings, BASELINE)}")
        everything += [Timing(f"{t.name}, {tensors}x{values}", t.seconds, t.ratio) for t in timings]
    if args.json:
        settings = {"shapes": args.shapes, "device": device.type, **limits}
        write_json(args.json, "flat_masters", device, settings, BASELINE, everything)
    return 0


def contenders(device: torch.device, tensors: int, values: int) -> list[Contender]:
    return [
        Contender(f"{kind}, {name} AdamW", _step(device, tensors, values, flat=kind == "flat", **options))
        for name, options in (("fused", {"fused": True}), ("foreach", {"foreach": True}))
        for kind in ("plain", "flat")
    ]


def _step(device: torch.device, tensors: int, values: int, *, flat: bool, **options: bool) -> Callable[[], None]:
    half = default_half(device)
    model = nn.ParameterList(nn.Parameter(torch.randn(values, device=device, dtype=half)) for _ in range(tensors))
    params, masters = prep_param_lists(model, flat_master=flat)
    optimizer = torch.optim.AdamW(masters, **options)
    for param in params:
        param.grad = torch.randn_like(param)

    def step() -> None:
        model_grads_to_master_grads(params, masters, flat_master=flat)
        optimizer.step()
        master_params_to_model_params(params, masters, flat_master=flat)

    return step


def _shape(text: str) -> tuple[int, int]:
    tensors, found, values = text.partition("x")
    if not found or not tensors.isdigit() or not values.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not TENSORSxVALUES, for example 1000x64")
    return int(tensors), int(values)
