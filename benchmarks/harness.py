"""What every benchmark shares: timing contenders in turns, medians and ratios, a table, and JSON.

In each round every contender runs one step, in a rotating order, because the speed of a machine changes by more than
the differences that matter. A ratio is the median over rounds of a step's time over the baseline's time in
the same round.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from halfstep.cli.machine import describe_machine

__all__ = ["Contender", "Timing", "add_common_arguments", "interleave", "pick_device", "table", "write_json"]


class Contender(NamedTuple):
    """One way to do the same work. ``around`` makes a context for each step that is entered outside the timed part."""

    name: str
    step: Callable[[], object]
    around: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass(frozen=True)
class Timing:
    """The seconds of each timed step of a contender, and its ratio to the baseline."""

    name: str
    seconds: list[float]
    ratio: float

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def as_dict(self) -> dict[str, Any]:
        low, _, high = statistics.quantiles(self.seconds, n=4) if len(self.seconds) > 1 else self.seconds * 3
        return {
            "name": self.name,
            "median_ms": 1e3 * self.median,
            "quartiles_ms": [1e3 * low, 1e3 * high],
            "ratio": self.ratio,
            "rounds": len(self.seconds),
        }


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that every benchmark has."""
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one, else cpu")
    parser.add_argument("--steps", type=int, default=20, help="rounds to time at least (default 20)")
    parser.add_argument("--min-seconds", type=float, default=0.0, help="go on for at least this long")
    parser.add_argument("--max-seconds", type=float, default=300.0, help="stop after this long (default 300)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to a file")


def pick_device(name: str | None) -> torch.device:
    """The named device, else CUDA where there is one, else the CPU."""
    if name == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda, but torch finds no CUDA device here")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def interleave(
    contenders: Sequence[Contender],
    *,
    device: torch.device,
    baseline: str,
    rounds: int,
    min_seconds: float = 0.0,
    max_seconds: float = 300.0,
    warm_up: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Timing]:
    """Time one step of each contender a round, for at least ``rounds`` and ``min_seconds``, up to ``max_seconds``.

    ``time.thread_time`` as the clock counts the time of this thread alone, for a CPU that other programs use too.
    """
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    began = time.perf_counter()
    done = 0
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        while True:
            elapsed = time.perf_counter() - began
            counted = done - warm_up
            if counted >= 1 and (elapsed > max_seconds or (counted >= rounds and elapsed >= min_seconds)):
                break
            turn = done % len(contenders)
            for contender in [*contenders[turn:], *contenders[:turn]]:
                with contender.around():
                    taken = timed(contender.step, device, clock)
                if done >= warm_up:
                    seconds[contender.name].append(taken)
            done += 1
    finally:
        if collecting:
            gc.enable()
    base = seconds[baseline]
    return [
        Timing(name, taken, statistics.median(t / b for t, b in zip(taken, base, strict=True)))
        for name, taken in seconds.items()
    ]


def timed(step: Callable[[], object], device: torch.device, clock: Callable[[], float] = time.perf_counter) -> float:
    if device.type != "cuda":
        began = clock()
        step()
        return clock() - began
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    step()
    torch.cuda.synchronize(device)
    return time.perf_counter() - began


def table(timings: Sequence[Timing], baseline: str) -> str:
    """The timings as lines of plain text."""
    width = max(len(timing.name) for timing in timings)
    lines = [f"{'':<{width}}  {'median ms':>10}  {'quartiles ms':>19}  {f'ratio to {baseline}':>{9 + len(baseline)}}"]
    for timing in timings:
        figures = timing.as_dict()
        low, high = figures["quartiles_ms"]
        ratio = f"{timing.ratio:.3f}"
        lines.append(
            f"{timing.name:<{width}}  {figures['median_ms']:>10.3f}  {f'{low:.3f} - {high:.3f}':>19}  "
            f"{ratio:>{9 + len(baseline)}}"
        )
    return "\n".join(lines)


def write_json(
    path: Path, benchmark: str, device: torch.device, settings: dict[str, Any], baseline: str, timings: Sequence[Timing]
) -> None:
    """Write the figures, with everything that is needed to repeat them."""
    record = {
        "benchmark": benchmark,
        "settings": settings,
        "machine": describe_machine(device),
        "baseline": baseline,
        "timings": [timing.as_dict() for timing in timings],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
