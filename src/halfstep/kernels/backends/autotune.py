"""The launch configuration of a kernel: measured once for each kernel on each kind of GPU, then read from the cache."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ...core.files import cache_directories, write_whole
from ..expr import ElementwiseKernel, trace

__all__ = ["CONFIGS", "DEFAULT", "READING", "LaunchConfig", "default", "fastest"]

logger = logging.getLogger("halfstep")


@dataclass(frozen=True)
class LaunchConfig:
    """How a kernel is divided into programs.

    Attributes:
        elements: how many one program works on; a power of two.
        warps: how many warps of 32 threads share them.
    """

    elements: int
    warps: int


DEFAULT = LaunchConfig(1024, 4)
"""Where nothing is measured: few elements, the interpreter, a graph being captured, a sum of squares.

``python -m benchmarks triton_offline --config ELEMENTS WARPS`` has the figures behind it. A pass is as fast as memory
if enough bytes are asked for at once, and registers limit that. FusedAdam on split masters needs, on an H100, 93
registers for 8 elements a thread: 5 programs of 4 warps fit on a multiprocessor, with 70 KiB in flight. 4 elements need
53 registers (56 KiB in flight, and accesses half as wide on AMD), 16 elements 168: there is room for 3 programs only,
and loads of one overlap less with arithmetic and stores of others, though 84 KiB are in flight. With 8 or 16 warps and
the same 8 elements a thread it is 56 KiB, and LAMB spills with 8.
"""

READING = LaunchConfig(4096, 8)
"""The same for kernels that store nothing. They need few registers, so that 16 elements a thread keep more in flight
(40 KiB for 16-bit gradients, not 24), in accesses of 16 bytes, and there are fewer sums to add up."""

CONFIGS = (
    LaunchConfig(512, 4),
    DEFAULT,
    LaunchConfig(1024, 8),
    LaunchConfig(2048, 4),
    LaunchConfig(2048, 8),
    READING,
    LaunchConfig(4096, 16),
)


def default(kernel: ElementwiseKernel) -> LaunchConfig:
    """The configuration of a kernel that was not measured."""
    return DEFAULT if trace(kernel).stores else READING


def fastest(
    identity: str, measure: Callable[[LaunchConfig], float], configs: Sequence[LaunchConfig] = CONFIGS
) -> LaunchConfig:
    """The configuration that takes the least time, from the cache if it was measured before.

    Args:
        identity: what the answer depends on: the kernel's source, the GPU's name, the compiler's version.
        measure: milliseconds that a launch takes; infinity if it cannot run so.
        configs: to choose from.
    """
    name = f"launch-{hashlib.sha256(identity.encode()).hexdigest()[:20]}.json"
    paths = [folder / name for folder in cache_directories()]
    for known in map(_read, paths):
        if known is not None and known in configs:
            return known
    times = {config: measure(config) for config in configs}
    best = min(times, key=times.__getitem__)
    if not math.isfinite(times[best]):
        return DEFAULT
    logger.info("Tuned a fused kernel: %s takes %.3g ms, %s takes %.3g ms", best, times[best], DEFAULT, times[DEFAULT])
    for path in paths:
        with suppress(OSError):  # read-only, or full: the next
            write_whole(path, json.dumps(asdict(best)))
            break
    return best


def _read(path: Path) -> LaunchConfig | None:
    try:
        return LaunchConfig(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # not measured yet, or not written by this version
        return None
