"""``ChromeTrace``: the ops, kernels and marks of a trace of torch.profiler, each kernel with the op that launched it.

A kernel belongs to the call of the runtime with its correlation, or its external id, and that call to the innermost op
that was running in its thread. Nothing here looks at names of kernels: they change with each version of a library.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.errors import ArgumentValueError, UsageError

__all__ = [
    "FORWARD",
    "STEP",
    "Call",
    "ChromeTrace",
    "Piece",
    "covered",
    "minus",
    "overlap",
    "parsed",
    "read_trace",
    "union",
]

STEP, FORWARD = "halfstep.step", "halfstep.forward"
"""The names of the marks that ``profile`` puts around each step, and at the first call of a module in it."""

_DTYPES = {
    **dict.fromkeys(("float", "Float"), "float32"),
    **dict.fromkeys(("double", "Double"), "float64"),
    **dict.fromkeys(("c10::BFloat16", "BFloat16"), "bfloat16"),
    **dict.fromkeys(("c10::Half", "Half"), "float16"),
    **dict.fromkeys(("c10::Float8_e4m3fn", "c10::Float8_e5m2"), "float8"),
}
_DEVICE = frozenset(("kernel", "gpu_memcpy", "gpu_memset"))
_SHAPES = ("Input Dims", "Input type", "Input Strides", "Concrete Inputs")
_ARGS = (*_SHAPES, "External id", "correlation", "dtype")
_FIELDS = ("ph", "cat", "name", "pid", "tid", "ts", "dur", "args")
_HOST = frozenset(("cpu_op", "user_annotation"))
_RUNTIME = frozenset(("cuda_runtime", "cuda_driver"))

Interval = tuple[float, float]


@dataclass(slots=True, eq=False)
class Call:
    """A call of an op, or a mark of the host.

    Attributes:
        name: the name of the op.
        start: the start in microseconds.
        end: the end.
        dims: the sizes of its arguments; [] for arguments that are not tensors.
        dtypes: the dtypes of its arguments; "" for what is not floating point.
        strides: the strides of its arguments.
        parent: the call in which it runs.
        mark: True for an annotation.
        made: the dtype that a collective says it sends.
        like: the first call that equals it, and runs in equal calls, apart from the time; None until calls are nested.
    """

    name: str
    start: float
    end: float
    dims: Sequence[Any] = ()
    dtypes: Sequence[str] = ()
    strides: Sequence[Any] = ()
    parent: Call | None = None
    mark: bool = False
    concrete: Sequence[str] = ()
    made: str = ""
    like: Call | None = None

    def chain(self) -> Iterator[Call]:
        """Iterate over the call and those in which it runs, from the inside out."""
        call: Call | None = self
        while call is not None:
            yield call
            call = call.parent


@dataclass(slots=True, eq=False)
class Piece:
    """An interval in which the device works for one call: a kernel, or on a CPU the time of an op itself.

    Attributes:
        start: the start in microseconds.
        end: the end.
        call: the op; None if it is unknown.
        name: the name of the kernel; "" on a CPU.
    """

    start: float
    end: float
    call: Call | None
    name: str = ""

    @property
    def time(self) -> float:
        """The duration in microseconds."""
        return self.end - self.start


@dataclass(eq=False)
class ChromeTrace:
    """The contents of a trace.

    Attributes:
        calls: the calls of ops, in the order of their start.
        marks: the annotations of the host.
        pieces: the work of the device.
        waits: calls of the runtime in which the host waits for the device.
        chip: the name of the device; "" if the trace has none.
        on_gpu: True if there are kernels.
    """

    calls: list[Call] = field(default_factory=list)
    marks: list[Call] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    waits: list[Interval] = field(default_factory=list)
    chip: str = ""
    on_gpu: bool = False

    @property
    def steps(self) -> list[Interval]:
        """The steps that are marked; one of the whole trace if none is."""
        marked = [(m.start, m.end) for m in self.marks if m.name == STEP or m.name.startswith("ProfilerStep#")]
        return marked or [self.window]

    @property
    def measured(self) -> Sequence[Any]:
        """The events that bound the time that is accounted: the kernels of a GPU, the steps of a CPU."""
        return self.pieces if self.on_gpu else [mark for mark in self.marks if mark.name == STEP]

    @property
    def window(self) -> Interval:
        """The time that is accounted: on a GPU from its first kernel to its last, on a CPU the steps."""
        parts = self.measured or self.calls
        return min(each.start for each in parts), max(each.end for each in parts)


def read_trace(path: str | Path) -> ChromeTrace:
    """Read a Chrome trace of torch.profiler, also one that gzip has packed.

    Raises:
        ArgumentValueError: for a file that is missing or is not such a trace.
        UsageError: for a trace without events of a device that take time.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
        trace = trace_of(*parsed(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data))
    except FileNotFoundError:
        raise ArgumentValueError(f"{str(path)!r} is not a file; give the path of a trace.") from None
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ArgumentValueError(
            f"{str(path)!r} is not a Chrome trace of torch.profiler ({type(error).__name__}: {str(error)[:80]}). "
            "Write one with profiler.export_chrome_trace(path)."
        ) from None
    if not any(each.end > each.start for each in trace.measured):
        raise UsageError(
            f"{path.name} has no events of a device that take time. Record it with activities=[ProfilerActivity.CPU, "
            "ProfilerActivity.CUDA]; on a CPU call halfstep.profile(step)."
        )
    return trace


def parsed(text: str | bytes) -> tuple[list[dict[str, Any]], str]:
    """Parse a trace into its complete events and the name of the device, "" if the trace does not name it.

    Of each event only what is read here is kept, and equal arguments are kept once.
    """
    seen: dict[str, Any] = {}

    def kept(found: dict[str, Any]) -> Any:
        if "ph" in found:
            if found["ph"] != "X" or found.get("cat") not in _HOST | _DEVICE | _RUNTIME:
                return None
            times = {"ts": float(found["ts"]), "dur": float(found["dur"])}
            if not math.isfinite(sum(times.values())):
                raise ValueError(f"{found.get('name')!r} at {found['ts']} for {found['dur']}")
            return {name: found[name] for name in _FIELDS if name in found} | times
        args = {name: found[name] for name in _ARGS if name in found}
        for name in args.keys() & set(_SHAPES):
            args[name] = seen.setdefault(repr(args[name]), args[name])
        return args or found

    known = json.loads(text, object_hook=kept)
    trace = known if isinstance(known, dict) else {"traceEvents": known}
    events = [each for each in trace["traceEvents"] if each is not None and each["ph"] == "X"]
    devices = trace.get("deviceProperties") or [{}]
    return events, str(devices[0].get("name", ""))


def trace_of(events: Sequence[dict[str, Any]], chip: str = "") -> ChromeTrace:
    """Make a ``ChromeTrace`` of the complete events of a Chrome trace."""
    trace = ChromeTrace(chip=chip, on_gpu=any(each.get("cat") in _DEVICE for each in events))
    by_thread: dict[Any, list[Call]] = {}
    by_id: dict[Any, Call] = {}
    for each in events:
        if each.get("cat") in _HOST:
            call = _call(each)
            (trace.marks if call.mark else trace.calls).append(call)
            if call.name != STEP:  # the step of a script begins and ends inside a step of its optimizer
                by_thread.setdefault((each["pid"], each["tid"]), []).append(call)
            by_id.setdefault(each.get("args", {}).get("External id", call), call)
    for calls in by_thread.values():
        calls.sort(key=lambda call: (call.start, -call.end))
    trace.calls.sort(key=lambda call: call.start)
    launches: dict[Any, Call | None] = {}
    for thread, launched in _runtime(events).items():
        for each, inner in zip(launched, _innermost(by_thread.get(thread, []), launched), strict=True):
            for key in _keys(each):
                launches.setdefault(key, inner)
            if "Synchronize" in each["name"]:
                trace.waits.append((each["ts"], each["ts"] + each["dur"]))
    alike: dict[Any, Call] = {}
    for calls in by_thread.values():
        own = _nest(calls, alike)
        trace.pieces += own if not trace.on_gpu else []
    for each in events if trace.on_gpu else ():
        if each.get("cat") in _DEVICE:
            known = [found for key in _keys(each) if (found := launches.get(key)) is not None]
            call_of = known[0] if known else by_id.get(each.get("args", {}).get("External id"))
            trace.pieces.append(Piece(each["ts"], each["ts"] + each["dur"], call_of, each["name"]))
            if call_of is not None and "dtype" in each.get("args", {}):
                call_of.made = _DTYPES.get(each["args"]["dtype"], "")
    trace.pieces.sort(key=lambda piece: piece.start)
    return trace


def _call(event: dict[str, Any]) -> Call:
    args = event.get("args", {})
    dims, types, strides, concrete = (args.get(name) or () for name in _SHAPES)
    dtypes = tuple(_DTYPES.get(each, "") for each in types)
    start, mark, made = event["ts"], event["cat"] == "user_annotation", _DTYPES.get(args.get("dtype", ""), "")
    return Call(event["name"], start, start + event["dur"], dims, dtypes, strides, None, mark, concrete, made)


def _keys(event: dict[str, Any]) -> list[tuple[str, Any]]:
    args = event.get("args", {})
    return [(name, args[name]) for name in ("correlation", "External id") if name in args]


def _runtime(events: Sequence[dict[str, Any]]) -> dict[Any, list[dict[str, Any]]]:
    found: dict[Any, list[dict[str, Any]]] = {}
    for each in sorted((each for each in events if each.get("cat") in _RUNTIME), key=lambda event: event["ts"]):
        found.setdefault((each["pid"], each["tid"]), []).append(each)
    return found


def _innermost(calls: Sequence[Call], launched: Sequence[dict[str, Any]]) -> list[Call | None]:
    """Find for each event of the runtime the innermost call that is running in its thread."""
    found: list[Call | None] = []
    running: list[Call] = []
    at = 0
    for event in launched:
        while at < len(calls) and calls[at].start <= event["ts"]:
            running.append(calls[at])
            at += 1
        running = [call for call in running if call.end >= event["ts"]]
        found.append(running[-1] if running else None)
    return found


def _nest(calls: Sequence[Call], alike: dict[Any, Call]) -> list[Piece]:
    """Set the parents of the calls of a thread; return the time of each op in which no op inside it runs.

    ``alike`` has the first of the calls that are alike, by the parent's and the objects that ``parsed`` shares.
    """
    pieces: list[Piece] = []
    running: list[Call] = []
    at = 0.0

    def until(time: float) -> None:
        nonlocal at
        if running and time > at and not running[-1].mark:
            pieces.append(Piece(at, time, running[-1]))
        at = max(at, time)

    for call in calls:
        while running and running[-1].end <= call.start:
            until(running[-1].end)
            running.pop()
        until(call.start)
        call.parent = running[-1] if running else None
        shared = (call.dtypes, *map(id, (call.dims, call.strides, call.concrete)))
        call.like = alike.setdefault((call.parent and call.parent.like, call.name, call.mark, *shared), call)
        running.append(call)
    while running:
        until(running[-1].end)
        running.pop()
    return pieces


# ---- intervals: sorted lists of (start, end) that do not overlap


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge intervals that overlap."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > start:
            merged.append((start, end))
    return merged


def covered(intervals: Iterable[Interval]) -> float:
    """The length of intervals that do not overlap."""
    return sum(end - start for start, end in intervals)


def minus(these: Sequence[Interval], those: Sequence[Interval]) -> list[Interval]:
    """Take ``those`` intervals out of ``these``; both are results of ``union``."""
    left: list[Interval] = []
    at = 0
    for start, end in these:
        while at < len(those) and those[at][1] <= start:
            at += 1
        inside = at
        while inside < len(those) and those[inside][0] < end:
            if those[inside][0] > start:
                left.append((start, those[inside][0]))
            start = max(start, those[inside][1])
            inside += 1
        if start < end:
            left.append((start, end))
    return left


def overlap(these: Sequence[Interval], those: Sequence[Interval]) -> list[Interval]:
    """The parts of ``these`` that lie in ``those``."""
    return minus(these, minus(these, those))
