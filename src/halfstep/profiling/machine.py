"""The rates of a machine: its rate of products in each dtype and its bandwidth, measured or from a table of chips."""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..core.hardware import has_units
from ..torch_internals.torch_compat import DisableTorchFunction

__all__ = ["CHIPS", "Machine", "chip_named", "cores", "denormal_cost", "machine_of", "thread_cost"]


@dataclass(frozen=True)
class Machine:
    """Rates of a device.

    Attributes:
        name: the name of the device.
        flops: the floating-point operations per second of a product in each dtype; "tf32" for float32 products in TF32.
        bandwidth: the bytes per second.
        source: the source of the rates.
        lacks: the 16-bit dtypes for whose products it has no units.
    """

    name: str
    flops: Mapping[str, float]
    bandwidth: float
    source: str
    lacks: tuple[str, ...] = ()

    def ms(self, dtype: str, flops: float, moved: float) -> float:
        """Compute the shortest time of an op by the roofline model, in milliseconds."""
        rate = self.flops.get(dtype) or self.flops["float32"]
        return 1e3 * max(flops / rate, moved / self.bandwidth)

    def gain(self, dtype: str, other: str) -> float:
        """Return the factor by which a product in ``other`` is faster than one in ``dtype``."""
        return self.flops.get(other, self.flops["float32"]) / self.flops.get(dtype, self.flops["float32"])


def _chip(name: str, source: str, bandwidth: float, **tera: float) -> Machine:
    lacks = tuple(half for half in ("bfloat16", "float16") if half not in tera)
    return Machine(name, {dtype: 1e12 * rate for dtype, rate in tera.items()}, 1e12 * bandwidth, source, lacks)


_NVIDIA = "NVIDIA's data sheet, dense"
CHIPS = {
    each.name: each
    for each in (
        _chip("H200", _NVIDIA, 4.8, bfloat16=989, float16=989, float8=1979, tf32=494, float32=67),
        _chip("H100 PCIe", _NVIDIA, 2.0, bfloat16=756, float16=756, float8=1513, tf32=378, float32=51),
        _chip("H100", _NVIDIA, 3.35, bfloat16=989, float16=989, float8=1979, tf32=494, float32=67),
        _chip("A100", _NVIDIA, 2.039, bfloat16=312, float16=312, tf32=156, float32=19.5),
        _chip("A10", _NVIDIA, 0.6, bfloat16=125, float16=125, tf32=62.5, float32=31.2),
        _chip("L4", _NVIDIA, 0.3, bfloat16=121, float16=121, tf32=60, float32=30.3),
        _chip("V100", _NVIDIA, 0.9, float16=125, float32=15.7),
        _chip("T4", _NVIDIA, 0.32, float16=65, float32=8.1),
        _chip("MI300X", "TraceLens, reached in practice", 5.3, bfloat16=708, float16=654, float8=1273, float32=163),
    )
}
"""Chips by the part of their name that a trace has. A longer name comes before its beginning."""


def chip_named(name: str) -> Machine | None:
    """Find a chip by its full name, as a trace has it, or by a part of it; None for one that is not in the table."""
    return next((chip for part, chip in CHIPS.items() if all(word in name for word in part.split())), None)


def cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def machine_of(device: torch.device, threads: int) -> Machine:
    """Measure a device, once per process.

    Args:
        device: the device.
        threads: the threads of torch, on which its rates depend.
    """
    size = 512 if device.type == "cpu" else 4096
    flops = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        if dtype is torch.float32 or has_units(device, dtype, "product"):
            a = torch.ones(size, size, device=device, dtype=dtype)
            flops[name] = 2.0 * size**3 / _seconds(functools.partial(torch.mm, a, a), device)
    x = torch.ones(4 << 20 if device.type == "cpu" else 64 << 20, device=device, dtype=torch.float32)
    bandwidth = 2.0 * x.nbytes / _seconds(functools.partial(torch.clone, x), device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type.upper()}, {threads} threads"
    lacks = tuple(half for half in ("bfloat16", "float16") if half not in flops)
    return Machine(name, flops, bandwidth, "measured", lacks)


def thread_cost(threads: int) -> float:
    """Measure by which factor small ops are slower with this many threads than with one thread per core."""
    a = torch.ones(384, 384, device="cpu", dtype=torch.float32)
    measured = {}
    for count in (threads, cores()):
        torch.set_num_threads(count)
        measured[count] = _seconds(lambda: torch.relu(a @ a), a.device, statistics.median)
    torch.set_num_threads(threads)
    return measured[threads] / measured[cores()]


@functools.cache
def denormal_cost() -> tuple[float, float]:
    """Measure by which factors products and elementwise ops are slower on denormal numbers."""
    one = torch.ones(256, 256, device="cpu", dtype=torch.float32)
    low = torch.full_like(one, 1e-40)
    times = [[_seconds(functools.partial(op, x, one), x.device) for x in (low, one)] for op in (torch.mm, torch.mul)]
    return times[0][0] / times[0][1], times[1][0] / times[1][1]


def _seconds(call: Callable[[], Any], device: torch.device, pick: Callable[[list[float]], float] = min) -> float:
    """Measure the time of a call: the shortest of nine, or what ``pick`` chooses."""
    times = []
    with torch.no_grad(), torch.autocast(device.type, enabled=False), DisableTorchFunction():  # no casts of O1
        for _ in range(10):
            begin = time.perf_counter()
            call()
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            times.append(time.perf_counter() - begin)
    return max(pick(times[1:]), 1e-9)
