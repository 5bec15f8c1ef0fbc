"""Rounding a tensor to each number format, divided by ``copy_`` of the tensor, and steps divided by fp32.

It rounds a tensor of 4096 x 1024 into a buffer that is kept, with blocks along its last dimension and along its first
one. For the comparison "torch cast" is a cast to float8_e4m3fn and back, and "torchao" its ``to_mx`` and
``dequantize`` for MXFP8, where it is installed. Both empty the cache for the copy that comes next; ``--format`` leaves
them out.

With ``--training`` it times steps of SGD of two models instead, by each recipe and in fp32: four linear layers of 1024
without biases with batches of 512 and 128, and a transformer block of width 256 with 512 tokens. For the comparison
"torchao mxfp8" trains with torchao's ``MXFP8Linear``, which emulates MXFP8 too, where it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from halfstep import amp
from halfstep.core.dtypes import dtype_name
from halfstep.formats import RECIPES, Format
from halfstep.formats.format import FORMATS
from halfstep.formats.quantize import round_to
from halfstep.kernels import backend_for

from .harness import Contender, Timing, add_common_arguments, interleave, pick_device, table, write_json

BASELINE = "copy"
_NEAREST = "nvfp4; input_gradient=nvfp4 @ nvfp4; weight_gradient=nvfp4 @ nvfp4; hadamard="
_CONTENDERS = {"fp32": "", **{name: name for name in RECIPES}, "nvfp4, Hadamard 128": "nvfp4; hadamard=128"}
_CONTENDERS |= {f"nvfp4, gradients to the nearest, Hadamard {size}": f"{_NEAREST}{size}" for size in (0, 16)}
"""The recipes of the training steps by their labels; none for fp32."""
_TORCHAO = "torchao mxfp8"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser)
    parser.add_argument("--size", type=int, nargs=2, default=[4096, 1024], help="default: 4096 1024")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], action="append", help="default: fp32, bf16"
    )
    parser.add_argument("--training", action="store_true", help="time training steps by each recipe")
    parser.add_argument("--cpu-time", action="store_true", help="time of one thread, on a CPU that others use too")
    parser.add_argument("--recipe", action="append", help="a label of --training beside fp32; default: all")
    parser.add_argument("--format", action="append", help="a format as it prints; default: all that have a name")


def run(args: argparse.Namespace) -> int:
    device = pick_device(args.device)
    if args.cpu_time:
        torch.set_num_threads(1)
    clock = time.thread_time if args.cpu_time else time.perf_counter
    limits: dict[str, Any] = {"rounds": args.steps, "min_seconds": args.min_seconds, "max_seconds": args.max_seconds}
    everything: list[Timing] = []
    if args.training:
        known = _CONTENDERS | ({_TORCHAO: _TORCHAO} if importlib.util.find_spec("torchao") else {})
        recipes = {label: known[label] for label in ("fp32", *(args.recipe or list(known)[1:]))}
        for name, model, shape in _models(device):
            x = torch.randn(shape, device=device)
            contenders = [Contender(label, partial(_step, model(), x, recipe)) for label, recipe in recipes.items()]
            print(f"{name}, backend {backend_for(device)}, {torch.get_num_threads()} threads")
            timings = interleave(contenders, device=device, baseline="fp32", clock=clock, **limits)
            print(table(timings, "fp32"))
            everything += [Timing(f"{name}, {timing.name}", timing.seconds, timing.ratio) for timing in timings]
        if args.json:
            write_json(args.json, "formats", device, limits, "fp32", everything)
        return 0
    formats = [Format.parse(text) for text in args.format or FORMATS]
    if not args.format:
        formats += [FORMATS[name].replace(rounding="stochastic") for name in ("fp8_e4m3", "mxfp8", "nvfp4")]
    for name in args.dtype or ["float32", "bfloat16"]:
        dtype: torch.dtype = getattr(torch, name)
        source = torch.randn(*args.size, device=device).to(dtype)
        out = torch.empty_like(source)
        print(f"{dtype_name(dtype)}, backend {backend_for(device)}, {torch.get_num_threads()} threads")
        contenders = [Contender(BASELINE, partial(out.copy_, source))]
        if not args.format:
            contenders.append(Contender("torch cast", partial(_cast, source)))
        for format in formats:
            contenders.append(Contender(str(format), partial(round_to, source, format, out=out)))
            if format.block != "tensor" and format.sides != (128, 128):
                contenders.append(Contender(f"{format}, dim=0", partial(round_to, source, format, dim=0, out=out)))
        if not args.format and importlib.util.find_spec("torchao") and dtype is not torch.float16:
            contenders.append(Contender("torchao mxfp8", partial(_torchao, source)))
        timings = interleave(contenders, device=device, baseline=BASELINE, clock=clock, **limits)
        print(table(timings, BASELINE))
        everything += [Timing(f"{name}, {timing.name}", timing.seconds, timing.ratio) for timing in timings]
    if args.json:
        write_json(args.json, "formats", device, limits, BASELINE, everything)
    return 0


def _models(device: torch.device) -> list[tuple[str, Callable[[], nn.Module], tuple[int, ...]]]:
    def mlp() -> nn.Module:
        return nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(1024, 1024, bias=False), nn.ReLU()))).to(
            device
        )

    def block() -> nn.Module:
        return nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True).to(device)

    mlps: list[tuple[str, Callable[[], nn.Module], tuple[int, ...]]] = [
        (f"MLP 4 x 1024, batch {n}", mlp, (n, 1024)) for n in (512, 128)
    ]
    return [*mlps, ("transformer block, width 256, 8 x 64 tokens", block, (8, 64, 256))]


def _step(model: nn.Module, x: torch.Tensor, recipe: str) -> None:
    if not hasattr(model, "is_prepared"):
        model.is_prepared = True  # type: ignore[assignment]
        if recipe == _TORCHAO:
            _set_torchao(model)
        elif recipe:
            amp.set_products(model, f"{recipe}; layers=all")
    model(x).square().mean().backward()
    with torch.no_grad():
        for param in model.parameters():
            param.sub_(param.grad, alpha=1e-3)  # type: ignore[arg-type]
            param.grad = None


def _set_torchao(model: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
        from torchao.quantization.quantize_.common.kernel_preference import KernelPreference
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                bias = child.bias is not None
                layer = MXFP8Linear(
                    child.in_features, child.out_features, bias, kernel_preference=KernelPreference.EMULATED
                )
                layer.load_state_dict(child.state_dict())
                setattr(parent, name, layer)


def _cast(source: torch.Tensor) -> torch.Tensor:
    return source.to(torch.float8_e4m3fn).to(source.dtype)


def _torchao(source: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.prototype.mx_formats.mx_tensor import MXTensor

        quantized = MXTensor.to_mx(source, torch.float8_e4m3fn, 32)
        return quantized.dequantize(source.dtype)
