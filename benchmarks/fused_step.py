"""A whole optimizer step from scaled gradients to 16-bit weights: torch's usual loop against the fused optimizers.

torch keeps fp32 weights: autocast casts them to 16 bits for the model, autograd casts the gradients back, GradScaler
unscales, ``clip_grad_norm_`` clips, ``AdamW(fused=True)`` steps. halfstep keeps 16-bit weights with masters, and one
fused step does all of this. No model runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from halfstep import amp, optimizers
from halfstep.kernels import backend, backend_for

from .harness import Contender, Timing, add_common_arguments, interleave, pick_device, table, write_json

BASELINE = "torch"
BYTES = {"torch": 48, "split": 28}
"""Bytes that a step reads and writes for each parameter, in torch's loop and in the fused step."""


def _transformer(layers: int = 12, width: int = 768, vocabulary: int = 32_000) -> list[tuple[int, ...]]:
    block = [(3 * width, width), (3 * width,), (width, width), (width,), (4 * width, width), (4 * width,)]
    block += [(width, 4 * width), (width,), (width,), (width,), (width,), (width,)]
    return [(vocabulary, width), (1024, width), *block * layers, (width,), (width,)]


def _resnet50() -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for shape in ((width, inputs, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)):
                shapes += [shape, (shape[0],), (shape[0],)]
            if block == 0:
                shapes += [(4 * width, inputs, 1, 1), (4 * width,), (4 * width,)]
            inputs = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


LISTS: dict[str, Callable[[], list[tuple[int, ...]]]] = {
    "20M in 10": lambda: [(2_000_000,)] * 10,
    "400x16": lambda: [(16,)] * 400,
    "1600x16": lambda: [(16,)] * 1600,
    "resnet50": _resnet50,
    "transformer": _transformer,
    "1e9": lambda: [(50_000_000,)] * 20,
}
DEFAULTS = {"cpu": ["20M in 10", "400x16", "1600x16"], "cuda": list(LISTS)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser)
    parser.add_argument("--lists", nargs="+", choices=LISTS, help="default: the first three on a CPU, all on CUDA")


def run(args: argparse.Namespace) -> int:
    device = pick_device(args.device)
    limits = {"rounds": args.steps, "min_seconds": args.min_seconds, "max_seconds": args.max_seconds}
    print(f"{device.type}, {torch.get_num_threads()} threads, backend {backend_for(device)}")
    everything: list[Timing] = []
    for name in args.lists or DEFAULTS[device.type]:
        shapes = LISTS[name]()
        count = sum(torch.Size(shape).numel() for shape in shapes)
        timings = interleave(_contenders(shapes, device), device=device, baseline=BASELINE, **limits)
        print(f"\n{name}: {len(shapes)} tensors, {count / 1e6:.4g} million parameters\n{table(timings, BASELINE)}")
        for timing in timings:
            if timing.name in BYTES and count > 1_000_000:
                print(f"  {timing.name}: {BYTES[timing.name] * count / timing.median / 1e9:.1f} GB/s")
        everything += [Timing(f"{t.name}, {name}", t.seconds, t.ratio) for t in timings]
    for name, held in _bytes_held(device).items():
        print(f"{name} holds {held:.2f} bytes a parameter in weights, gradients, masters and state")
    if args.json:
        settings = {"device": device.type, "bytes_held": _bytes_held(device), **limits}
        write_json(args.json, "fused_step", device, settings, BASELINE, everything)
    return 0


def _contenders(shapes: list[tuple[int, ...]], device: torch.device) -> list[Contender]:
    fused = partial(fused_step, shapes, device)
    contenders = [
        Contender(BASELINE, torch_step(shapes, device)),
        Contender("torch, foreach=False", torch_step(shapes, device, fused=False, foreach=False)),
        Contender("split", fused(master_weights="split")),
        Contender("torch.AdamW at O2", _at_o2(shapes, device, fused=True)),
        Contender("torch.AdamW at O2, fused=False", _at_o2(shapes, device, fused=False)),
        Contender("plain", fused(master_weights="plain")),
        Contender("plain, float16", fused(dtype=torch.float16, master_weights="plain")),
        Contender("split, bf16 exp_avg", fused(master_weights="split", state_dtype=torch.bfloat16)),
    ]
    if backend_for(device) != "eager":
        step = fused(master_weights="split")

        def on_eager() -> None:
            with backend("eager"):
                step()

        contenders.append(Contender("split, eager", on_eager))
    return contenders


def torch_step(
    shapes: list[tuple[int, ...]],
    device: torch.device,
    make: Callable[..., Any] = torch.optim.AdamW,
    **options: Any,
) -> Callable[[], None]:
    params = [nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
    grads = [torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes]
    optimizer = make(params, lr=1e-4, **{"fused": True, **options})
    scaler = torch.amp.GradScaler(device.type, init_scale=1.0)
    scaler.scale(torch.ones((), device=device))

    def step() -> None:
        for param in params:
            param.detach().to(torch.bfloat16)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.float()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(params, 1.0)
        scaler.step(optimizer)
        scaler.update()

    return step


def fused_step(
    shapes: list[tuple[int, ...]],
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    make: Callable[..., Any] = optimizers.FusedAdam,
    **options: Any,
) -> Callable[[], None]:
    params = [nn.Parameter(torch.randn(shape, device=device).to(dtype)) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer = make(params, lr=1e-4, weight_decay=0.01, max_grad_norm=1.0, **options)
    scaler = amp.GradScaler(init_scale=1.0)
    scaler.scale(torch.ones((), device=device))

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    return step


def _at_o2(shapes: list[tuple[int, ...]], device: torch.device, *, fused: bool) -> Callable[[], None]:
    """A script with torch's optimizer and the defaults of O2: bfloat16, a loss scale of 1.0, clipped by torch."""
    model: Any = nn.ParameterList(nn.Parameter(torch.randn(shape, device=device)) for shape in shapes)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", dtype=torch.bfloat16, fused=fused, verbosity=0)
    params = list(model.parameters())
    # Autograd delivers them so: in fp32 where the parameter has a master, as of torch 2.13.
    grads = [torch.randn_like(param, dtype=getattr(param, "grad_dtype", param.dtype)) for param in params]
    loss = torch.ones((), device=device, requires_grad=True)

    def step() -> None:
        with amp.scale_loss(loss, optimizer):
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _bytes_held(device: torch.device) -> dict[str, float]:
    """Bytes of the tensors that are kept between steps, per parameter."""
    count = 1_000_000
    found = {}
    for name, options in (
        ("split", {"master_weights": "split"}),
        ("split, bf16 exp_avg", {"master_weights": "split", "state_dtype": torch.bfloat16}),
        ("plain", {"master_weights": "plain"}),
    ):
        param = nn.Parameter(torch.randn(count, device=device).bfloat16())
        param.grad = torch.randn_like(param)
        optimizer = optimizers.FusedAdam([param], **options)
        optimizer.step()
        state = [t for t in optimizer.state[param].values() if isinstance(t, torch.Tensor) and t.dim()]
        found[name] = sum(t.untyped_storage().nbytes() for t in (param, param.grad, *state)) / count
    return found
