"""16-bit products in the device's own kernels and in fp32 kernels with 16-bit rounding, for single ops and models.

For each dtype it times fp32, ``torch.autocast``, and ``amp.auto_cast`` with ``emulate=False`` and ``emulate=True``: the
forward and the backward pass, and for models a step of SGD. The ratio is to fp32. Put ``ONEDNN_MAX_CPU_ISA=AVX2
ATEN_CPU_CAPABILITY=avx2`` before the command to make a machine with 16-bit units behave like one without them.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from halfstep import amp
from halfstep.core.dtypes import dtype_name
from halfstep.core.errors import PrecisionWarning
from halfstep.core.hardware import has_units

from .harness import Contender, Timing, add_common_arguments, interleave, pick_device, table, write_json

BASELINE = "fp32"
Scope = Callable[[], AbstractContextManager[object]]
Step = Callable[[Scope], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser)
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], action="append", help="default: both")
    parser.add_argument("--no-native", action="store_true", help="leave out the kernels of the device itself")


def run(args: argparse.Namespace) -> int:
    device = pick_device(args.device)
    limits = {"rounds": args.steps, "min_seconds": args.min_seconds, "max_seconds": args.max_seconds}
    everything: list[Timing] = []
    warnings.simplefilter("ignore", PrecisionWarning)  # emulate=False warns, and it is timed here
    for name in args.dtype or ["bfloat16", "float16"]:
        dtype: torch.dtype = getattr(torch, name)
        units = "units" if has_units(device, dtype, "product") else "no units"
        print(f"{dtype_name(dtype)} on {device.type} ({units} for products), {torch.get_num_threads()} threads")
        for case, step in {**_ops(device), **_models(device)}.items():
            contenders = [
                Contender(scope, partial(step, make)) for scope, make in _scopes(device, dtype, args.no_native).items()
            ]
            print(f"\n{case}")
            able = [contender for contender in contenders if _is_able(contender)]
            timings = interleave(able, device=device, baseline=BASELINE, warm_up=1, **limits)
            print(table(timings, BASELINE))
            everything += [Timing(f"{name}, {case}, {t.name}", t.seconds, t.ratio) for t in timings]
        print()
    if args.json:
        write_json(args.json, "emulation", device, limits, BASELINE, everything)
    return 0


def _is_able(contender: Contender) -> bool:
    """Whether torch can run it: oneDNN has no 16-bit LSTM for CPUs without units."""
    try:
        contender.step()
    except RuntimeError as error:
        print(f"{contender.name}: {str(error).partition('.')[0]}")
        return False
    return True


def _scopes(device: torch.device, dtype: torch.dtype, no_native: bool) -> dict[str, Scope]:
    scopes: dict[str, Scope] = {BASELINE: nullcontext, "emulated": partial(amp.auto_cast, dtype=dtype, emulate=True)}
    if not no_native:
        scopes["torch.autocast"] = partial(torch.autocast, device.type, dtype)
        scopes["native"] = partial(amp.auto_cast, dtype=dtype, emulate=False)
    return scopes


def _ops(device: torch.device) -> dict[str, Step]:
    """Steps that run one op forward and backward, on fp32 inputs that the scopes cast."""
    cases: dict[str, tuple[Callable[..., torch.Tensor], list[tuple[int, ...]]]] = {
        "linear, 256 x 1024 x 1024": (F.linear, [(256, 1024), (1024, 1024), (1024,)]),
        "bmm, 32 of 64 x 64 x 64": (torch.bmm, [(32, 64, 64), (32, 64, 64)]),
        "conv2d, 16 x 32 x 32 x 32, 64 channels": (
            lambda x, w: F.conv2d(x, w, padding=1),
            [(16, 32, 32, 32), (64, 32, 3, 3)],
        ),
        "attention, 4 x 8 heads x 128 x 64": (F.scaled_dot_product_attention, [(4, 8, 128, 64)] * 3),
    }
    torch.manual_seed(0)
    return {
        name: partial(_call, function, [torch.randn(shape, device=device, requires_grad=True) for shape in shapes])
        for name, (function, shapes) in cases.items()
    }


def _call(function: Callable[..., torch.Tensor], inputs: list[torch.Tensor], scope: Scope) -> None:
    with scope():
        result = function(*inputs)
    result.backward(torch.ones_like(result))


class _Recurrent(nn.LSTM):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x)[0]


def _models(device: torch.device) -> dict[str, Step]:
    torch.manual_seed(0)
    cnn = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 8 * 8, 10),
    )  # fmt: skip
    mlp = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    block = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    models: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
        "CNN, 32 images of 32 x 32": (cnn, (32, 3, 32, 32)),
        "MLP, width 1024, batch 256": (mlp, (256, 512)),
        "transformer block, width 256, 4 x 64 tokens": (block, (4, 64, 256)),
        "LSTM, width 128, 32 steps of 16": (_Recurrent(128, 128), (32, 16, 128)),
    }
    return {
        name: partial(_step, model.to(device), torch.randn(shape, device=device))
        for name, (model, shape) in models.items()
    }


def _step(model: nn.Module, x: torch.Tensor, scope: Scope) -> None:
    with scope():
        result = model(x)
    result.float().square().mean().backward()
    with torch.no_grad():
        for param in model.parameters():
            param.sub_(param.grad, alpha=1e-4)
            param.grad = None
