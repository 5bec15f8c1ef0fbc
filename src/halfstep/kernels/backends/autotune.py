"""How a kernel is cut into programs: measured once for each kernel on each kind of GPU, then read from the cache."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from ...core.files import cache_directory, replacing

__all__ = ["CUTS", "DEFAULT", "Cut", "fastest"]

logger = logging.getLogger("halfstep")


@dataclass(frozen=True)
class Cut:
    """The shape of a launch.

    Attributes:
        elements: how many one program works on; a power of two.
        warps: how many warps of 32 threads share them.
    """

    elements: int
    warps: int


DEFAULT = Cut(4096, 8)
"""Where nothing is measured: few elements, the interpreter, a graph being captured."""

CUTS = (Cut(1024, 4), Cut(2048, 4), Cut(2048, 8), Cut(4096, 4), DEFAULT, Cut(8192, 8), Cut(8192, 16))


def fastest(identity: str, measure: Callable[[Cut], float], cuts: Sequence[Cut] = CUTS) -> Cut:
    """The cut that takes the least time, from the cache if it was measured before.

    Args:
        identity: what the answer depends on: the kernel's source, the GPU's name, the compiler's version.
        measure: milliseconds a launch takes with a cut; infinity if it cannot run so.
        cuts: to choose from.
    """
    path = cache_directory() / f"cut-{hashlib.sha256(identity.encode()).hexdigest()[:20]}.json"
    known = _read(path)
    if known is not None and known in cuts:
        return known
    times = {cut: measure(cut) for cut in cuts}
    best = min(times, key=times.__getitem__)
    if not math.isfinite(times[best]):
        return DEFAULT
    logger.info("Tuned a fused kernel: %s takes %.3g ms, %s takes %.3g ms", best, times[best], DEFAULT, times[DEFAULT])
    with replacing(path, shared=True) as unfinished:
        unfinished.write_text(json.dumps(asdict(best)), encoding="utf-8")
    return best


def _read(path: os.PathLike[str]) -> Cut | None:
    try:
        with open(path, encoding="utf-8") as file:
            return Cut(**json.load(file))
    except (OSError, ValueError, TypeError):  # not measured yet, or not written by this version
        return None
