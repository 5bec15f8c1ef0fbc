"""The launch configuration of a kernel: measured once for each kernel on each kind of GPU, then read from the cache."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ...core.files import cache_directory, replacing

__all__ = ["CONFIGS", "DEFAULT", "LaunchConfig", "fastest"]

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


DEFAULT = LaunchConfig(4096, 8)
"""Where nothing is measured: few elements, the interpreter, a graph being captured."""

CONFIGS = (
    LaunchConfig(1024, 4),
    LaunchConfig(2048, 4),
    LaunchConfig(2048, 8),
    LaunchConfig(4096, 4),
    DEFAULT,
    LaunchConfig(8192, 8),
    LaunchConfig(8192, 16),
)


def fastest(
    identity: str, measure: Callable[[LaunchConfig], float], configs: Sequence[LaunchConfig] = CONFIGS
) -> LaunchConfig:
    """The configuration that takes the least time, from the cache if it was measured before.

    Args:
        identity: what the answer depends on: the kernel's source, the GPU's name, the compiler's version.
        measure: milliseconds that a launch takes; infinity if it cannot run so.
        configs: to choose from.
    """
    path = cache_directory() / f"launch-{hashlib.sha256(identity.encode()).hexdigest()[:20]}.json"
    known = _read(path)
    if known is not None and known in configs:
        return known
    times = {config: measure(config) for config in configs}
    best = min(times, key=times.__getitem__)
    if not math.isfinite(times[best]):
        return DEFAULT
    logger.info("Tuned a fused kernel: %s takes %.3g ms, %s takes %.3g ms", best, times[best], DEFAULT, times[DEFAULT])
    with replacing(path, shared=True) as unfinished:
        unfinished.write_text(json.dumps(asdict(best)), encoding="utf-8")
    return best


def _read(path: Path) -> LaunchConfig | None:
    try:
        return LaunchConfig(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # not measured yet, or not written by this version
        return None
