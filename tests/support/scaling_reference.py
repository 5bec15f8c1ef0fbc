"""What a dynamic loss scale must do, in plain Python; every face is held to it."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from typing import Any

from hypothesis import strategies as st

SMALLEST, LARGEST = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127


def fp32(x: float) -> float:
    """Rounded to float32; inf where that overflows."""
    try:
        return struct.unpack("f", struct.pack("f", x))[0]
    except OverflowError:
        return math.inf


def reference(flags: Iterable[bool], rule: dict[str, Any]) -> list[tuple[float, int, int]]:
    """(scale, good, bad) after each update."""
    low, high = rule["min_scale"] or SMALLEST, rule["max_scale"] or LARGEST
    scale, good, bad, trace = fp32(min(max(rule["init_scale"], low), high)), 0, 0, []
    for overflow in flags:
        good, bad = (0, bad + 1) if overflow else (good + 1, 0)
        if bad and bad == rule["backoff_interval"]:
            scale, bad = max(fp32(scale * rule["backoff_factor"]), low), (bad - 1 if rule["sticky_backoff"] else 0)
        if good and good == rule["growth_interval"]:
            grown, good = fp32(scale * rule["growth_factor"]), 0
            scale = min(grown, high) if math.isfinite(grown) else scale
        trace.append((scale, good, bad))
    return trace


FLAGS = st.lists(st.booleans(), max_size=40)

INTERVALS = st.sampled_from([None, 1, 1, 2, 3, 7])
RULES = st.fixed_dictionaries(
    {
        "init_scale": st.integers(-130, 127).map(lambda k: 2.0**k) | st.floats(2.0**-10, 2.0**20, width=32),
        "growth_factor": st.sampled_from([2.0, 1.5, 3.0, 1000.0]),
        "backoff_factor": st.sampled_from([0.5, 0.25, 0.1, 1 / 1.5]),
        "growth_interval": INTERVALS,
        "backoff_interval": INTERVALS,
        "min_scale": st.sampled_from([None, 1.0, 2.0**-5]),
        "max_scale": st.sampled_from([None, 2.0**24, 2.0**100]),
        "sticky_backoff": st.booleans(),
    }
)
