"""Gradient release against the ordinary step of ``FusedAdam`` with split masters and a bfloat16 first moment.

The time is that of a backward pass, which only hands over gradients, and the step. The bytes are those of all tensors
that are alive at the peak of a training step of linear layers at O2, with a batch of one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from halfstep import amp, optimizers
from halfstep.kernels import backend_for

from .fused_step import DEFAULTS, LISTS
from .harness import Contender, Timing, add_common_arguments, interleave, pick_device, table, write_json

BASELINE = "ordinary"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser)
    parser.add_argument("--lists", nargs="+", choices=LISTS, help="default: the first three on a CPU, all on CUDA")
    parser.add_argument("--layers", type=int, default=64, help="of width 1024, where bytes are counted (default 64)")


def run(args: argparse.Namespace) -> int:
    device = pick_device(args.device)
    limits = {"rounds": args.steps, "min_seconds": args.min_seconds, "max_seconds": args.max_seconds}
    print(f"{device.type}, {torch.get_num_threads()} threads, backend {backend_for(device)}")
    everything: list[Timing] = []
    for name in args.lists or DEFAULTS[device.type]:
        contenders = [
            Contender(f"{way}{what}", _step(LISTS[name](), device, way == "released", scale))
            for what, scale in (("", None), (", loss scale", 64.0))
            for way in (BASELINE, "released")
        ]
        timings = interleave(contenders, device=device, baseline=BASELINE, **limits)
        print(f"\n{name}\n{table(timings, BASELINE)}")
        everything += [Timing(f"{t.name}, {name}", t.seconds, t.ratio) for t in timings]
    peaks = {}
    for scale in (1.0, 64.0):
        for released in (False, True):
            name = f"{'released' if released else BASELINE}, loss scale {scale:g}"
            peaks[name] = peak_bytes(args.layers, released=released, loss_scale=scale, device=device)
            print(f"{name}: {peaks[name]:.2f} bytes a parameter at the peak of a training step")
    if args.json:
        settings = {"device": device.type, "layers": args.layers, "peak_bytes": peaks, **limits}
        write_json(args.json, "gradient_release", device, settings, BASELINE, everything)
    return 0


def _step(
    shapes: list[tuple[int, ...]], device: torch.device, released: bool, scale: float | None
) -> Callable[[], None]:
    params = [nn.Parameter(torch.randn(shape, device=device).bfloat16()) for shape in shapes]
    grads = [torch.randn_like(param) for param in params]
    optimizer = optimizers.FusedAdam(params, master_weights="split", state_dtype=torch.bfloat16)
    scaler = amp.GradScaler(enable=scale is not None, init_loss_scaling=scale or 1.0)
    scaler.scale(torch.ones((), device=device))
    optimizer.attach(nn.ParameterList(params), release=released, scaler=scaler)

    def step() -> None:
        torch.autograd.backward([param.view_as(param) for param in params], grads)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that an op has touched and that are alive.

    Attributes:
        peak: the most that there ever were.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, result)):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                ref = StorageWeakRef(storage)
                self._live[ref.cdata] = ref, storage.nbytes()
        self._live = {key: (ref, size) for key, (ref, size) in self._live.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return result


def peak_bytes(layers: int, *, released: bool, loss_scale: float, device: torch.device, width: int = 1024) -> float:
    """Bytes a parameter that are alive at the peak of a training step, the second one."""
    model: Any = nn.Sequential(*(nn.Linear(width, width, bias=False, device=device) for _ in range(layers)))
    optimizer: Any = optimizers.FusedAdam(model.parameters(), state_dtype=torch.bfloat16)
    options: Any = {"opt_level": "O2", "dtype": torch.bfloat16, "loss_scale": loss_scale, "verbosity": 0}
    model, optimizer = amp.initialize(model, optimizer, **options)
    optimizer.attach(model, release=released)
    x = torch.randn(1, width, device=device, dtype=torch.bfloat16)
    counter = LiveBytes()
    for counts in (nullcontext(), counter):
        with counts:
            for param, state in optimizer.state.items():
                for tensor in (param, *state.values()):
                    tensor.detach()  # kernels are no ops, so this shows the counter what they work on
            with amp.scale_loss(model(x).float().square().mean(), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return counter.peak / sum(param.numel() for param in model.parameters())
