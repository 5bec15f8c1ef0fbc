"""``Account``: the time of a step by kind. Each microsecond is counted once, even if streams overlap."""

from __future__ import annotations

import functools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from .machine import Machine
from .ops import KINDS, Work, works_of
from .trace import FORWARD, STEP, ChromeTrace, Interval, covered, minus, overlap, union

__all__ = ["Account", "RunSettings", "inside"]

_COMPUTE = ("products", "casts", "memory-bound ops", "loss scale", "optimizer", "waits for the device", "not named")
_RUN = 300.0  # microseconds between two numbers that are read one after the other
_VIEWS = frozenset(f"aten::{name}" for name in ("as_strided", "flatten", "select", "slice", "unbind", "view"))
_LOADS = "enumerate(DataLoader)"


@dataclass(frozen=True)
class RunSettings:
    """Facts about the process that ran the steps, which are not in a trace.

    Attributes:
        device: the device; None for a trace from another machine.
        threads: the threads of torch.
        cores: the cores of the process.
        thread_cost: the factor by which small ops take longer than with a thread for each core.
        tf32_off: True if float32 products may not use TF32, on a GPU that has it.
        denormal: the share of elements that are denormal, by the sizes of a tensor.
        denormal_cost: the factors by which a product, and an op by element, take longer on denormal numbers.
        weights: the elements of all parameters that an optimizer steps.
        half: the 16-bit dtypes in the model.
    """

    device: torch.device | None = None
    threads: int = 0
    cores: int = 0
    thread_cost: float = 1.0
    tf32_off: bool = False
    denormal: Mapping[tuple[int, ...], float] = field(default_factory=dict)
    denormal_cost: tuple[float, float] = (1.0, 1.0)
    weights: int = 0
    half: tuple[str, ...] = ()


class Account:
    """A trace with its time by kind.

    Args:
        trace: the trace.
        machine: the rates of its device.
        settings: facts that are not in the trace.

    Attributes:
        steps: the number of steps.
        works: the work of the device.
        total, busy, idle: microseconds of all steps.
        kinds: microseconds by kind.
        host: the intervals in which the device has nothing to do, and waits neither for data nor for a read.
        data: the intervals in which a step waits for data.
        reads: the intervals in which the host reads values one by one, with the views that select them.
        half: the 16-bit dtype that the model computes in; "" if there is none.
    """

    def __init__(self, trace: ChromeTrace, machine: Machine, settings: RunSettings) -> None:
        self.trace, self.machine, self.settings = trace, machine, settings
        self.steps = len(trace.steps)
        start, end = trace.window
        self.works = works_of(piece for piece in trace.pieces if start <= piece.start < end)
        steps = [] if trace.on_gpu else self.marked(STEP)  # between them the profiler itself works
        self.window = overlap([(start, end)], steps) if steps else [(start, end)]
        self.total = covered(self.window)
        self.data = self._data()
        spans = {kind: self.spans(each for each in self.works if each.kind == kind) for kind in KINDS}
        sent = self.marked(*(() if trace.on_gpu else ("gloo:", "mpi:", "nccl:", "ucc:")))
        claimed: list[Interval] = [] if trace.on_gpu else overlap(self.marked(_LOADS), self.window)
        compute = minus(union(span for kind in _COMPUTE for span in spans[kind]), claimed)
        self.kinds = dict.fromkeys(KINDS, 0.0)
        for kind in _COMPUTE:
            self.kinds[kind] = covered(minus(spans[kind], claimed))
            claimed = union([*claimed, *spans[kind]])
        sending = overlap(union([*spans["communication, exposed"], *sent]), self.window)
        self.exposed = minus(sending, compute)
        self.kinds["communication, exposed"] = covered(self.exposed)
        self.kinds["communication, hidden"] = covered(sending) - covered(self.exposed)
        busy = union([*compute, *sending])
        idle = minus(self.window, busy)
        self.busy, self.idle = covered(busy), covered(idle)
        self.data = overlap(self.data, idle)  # on a CPU with the ops of a DataLoader, which are not busy
        left = minus(idle, self.data)
        self.waits = overlap(self._waits(), left)
        self.host = minus(left, self.waits)
        self.kinds["waits for data"] += covered(self.data)
        self.kinds["waits for the device"] += covered(self.waits)
        self.kinds["host"] = covered(self.host)
        self.reads = self._reads()
        dtypes = {each.dtype for each in self.works if each.kind in ("products", "memory-bound ops")}
        self.half = min(dtypes & {"bfloat16", "float16"} | set(settings.half), default="")

    @functools.cached_property
    def model(self) -> list[Work]:
        """The works of the model: without optimizer, data, and numbers that are read."""
        other = union([*self.marked("Optimizer."), *self.data, *self.reads])
        apart = set(map(id, inside(self.works, other)))
        kinds = ("products", "memory-bound ops", "casts")
        return [each for each in self.works if each.kind in kinds and id(each) not in apart and not each.zeroes]

    def spans(self, works: Iterable[Work]) -> list[Interval]:
        """Merge the intervals of works."""
        return union((each.piece.start, each.piece.end) for each in works)

    def marked(self, *names: str) -> list[Interval]:
        """Merge the intervals of the annotations whose names begin with one of ``names``."""
        return union((each.start, each.end) for each in self.trace.marks if each.name.startswith(names))

    def ms(self, microseconds: float) -> float:
        """Convert microseconds of all steps to milliseconds per step."""
        return microseconds / 1e3 / self.steps

    def _data(self) -> list[Interval]:
        firsts = sorted(mark.start for mark in self.trace.marks if mark.name == FORWARD)
        before = []
        for start, end in self.trace.steps:
            first = next((at for at in firsts if start <= at < end), None)
            before += [(start, first)] if first is not None else []
        other = [*self.marked("Optimizer."), *self.spans(each for each in self.works if each.zeroes)]
        return union([*minus(union(before), union(other)), *self.marked(_LOADS)])

    def _waits(self) -> list[Interval]:
        """List the calls that wait for the device, each until the device has work again."""
        starts = [piece.start for piece in self.trace.pieces]
        found = [(begin, end, bisect_left(starts, end)) for begin, end in self.trace.waits]
        return union((begin, starts[at] if at < len(starts) else end) for begin, end, at in found)

    def _reads(self) -> list[Interval]:
        runs: list[list[float]] = []
        views: list[float] = []
        for each in self.trace.calls:
            start = min([*views, each.start])
            if each.name == "aten::item" and runs and start - runs[-1][1] < _RUN:
                runs[-1][1:] = [each.end, runs[-1][2] + 1]
            elif each.name == "aten::item":
                runs.append([start, each.end, 1])
            views = (views or [each.start]) if each.name in _VIEWS else []
        return union((start, end) for start, end, count in runs if count >= 5)


def inside(works: Sequence[Work], intervals: Sequence[Interval]) -> list[Work]:
    """List the works that begin in the intervals; both are sorted by time."""
    ends, found = [end for _, end in intervals], []
    for each in works:
        at = bisect_right(ends, each.piece.start)
        if at < len(ends) and intervals[at][0] <= each.piece.start:
            found.append(each)
    return found
