"""The report of ``halfstep run --report``: loss scale, skipped steps, time and memory of every step of a script."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ..core.text import counted, numbered
from ..diagnostics.pages import (
    Line,
    Markup,
    between,
    figure,
    header,
    lines,
    made_by,
    note,
    numbers,
    paragraph,
    section,
    small,
    table,
    write_page,
)
from ..parameters.loss_scaler import DeviceLossScaler
from ..stepping.attached import AttachedOptimizer, creation_callbacks, observers, skipped_steps
from ..stepping.backward import Subscriber, Window
from .machine import machine_section
from .scale_picture import scale_figure, scale_line

__all__ = ["Recording", "recording", "robust_limit", "write_report"]


@dataclass
class OptimizerSteps:
    """The steps of one optimizer: each list has one entry per step.

    Attributes:
        name: the name of the optimizer's class.
        scales: by loss scaler, the scale of the latest loss of each step; NaN if there was no such loss.
        skipped: True for a skipped step.
        seconds: the time since the end of the previous step; for the first step, since the recording began.
        bytes: the peak of the allocated GPU memory, or the resident memory of the process.
        losses: the loss of the latest backward pass of the process; NaN before the first.
    """

    name: str
    scales: dict[DeviceLossScaler, list[float]] = field(default_factory=dict)
    skipped: list[bool] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def add_scales(self, used: dict[DeviceLossScaler, float]) -> None:
        """Add the scales of a step."""
        before = len(self.skipped)
        for scaler in [*self.scales, *(scaler for scaler in used if scaler not in self.scales)]:
            self.scales.setdefault(scaler, [math.nan] * before).append(used.get(scaler, math.nan))

    def last_scales(self) -> list[float]:
        """Return the latest value of each loss scale."""
        return [next(scale for scale in reversed(line) if scale == scale) for line in self.scales.values()]


class Recording(Subscriber):
    """An observer and a subscriber that records the steps of all optimizers under amp.

    Attributes:
        of: one ``OptimizerSteps`` per optimizer, in the order of their first steps.
        device: the device of the optimizer that made the latest step.
        loss: the loss of the latest backward pass, still multiplied by its scale.
    """

    def __init__(self) -> None:
        self.of: dict[AttachedOptimizer, OptimizerSteps] = {}
        self.device, self.loss = torch.device("cpu"), torch.tensor(math.nan, dtype=torch.float32, device="cpu")
        self._scales: WeakKeyDictionary[Window, dict[DeviceLossScaler, torch.Tensor]] = WeakKeyDictionary()
        self._before: tuple[dict[DeviceLossScaler, float], int, float] = ({}, 0, math.nan)
        self._last = time.perf_counter()

    def see_created(self, attached: AttachedOptimizer) -> None:
        """Receive an optimizer, and from now on the scale of its losses."""
        attached.window.subscribers.append(self)

    def closed(self, window: Window, scaler: DeviceLossScaler, scale: torch.Tensor) -> None:
        """Store the scale of a loss."""
        self._scales.setdefault(window, {})[scaler] = scale

    def before_step(self, attached: AttachedOptimizer) -> None:
        """Store the scales and the count of skipped steps. Reads the device."""
        scales = {scaler: float(scale) for scaler, scale in self._scales.pop(attached.window, {}).items()}
        self._before = scales, skipped_steps(attached.counts), float(self.loss) / next(reversed(scales.values()), 1.0)

    def after_step(self, attached: AttachedOptimizer) -> None:
        """Record the step. Reads the device."""
        scales, skipped, loss = self._before
        steps = self.of.setdefault(attached, OptimizerSteps(type(attached.optimizer).__name__))
        self.device = attached.window.device
        steps.add_scales(scales)
        steps.losses.append(loss)
        steps.skipped.append(skipped_steps(attached.counts) > skipped)
        steps.bytes.append(_memory(self.device))
        now = time.perf_counter()
        steps.seconds.append(now - self._last)
        self._last = now


@contextmanager
def recording() -> Iterator[Recording]:
    """Record every step of every optimizer under amp in this block."""
    record, backward = Recording(), torch.autograd.backward

    def keep_loss(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(tensors, torch.Tensor) and tensors.numel() == 1:
            record.loss = tensors.detach()
        backward(tensors, *args, **kwargs)

    observers.append(record)
    creation_callbacks.append(record.see_created)
    torch.autograd.backward = keep_loss
    try:
        yield record
    finally:
        torch.autograd.backward = backward
        creation_callbacks.remove(record.see_created)
        observers.remove(record)


def write_report(path: Path, record: Recording, script: str, command: str, ending: str) -> None:
    """Write the page of the report.

    Args:
        path: the file; its folder is created.
        record: the recorded steps.
        script: the name of the script.
        command: the command line.
        ending: a sentence about the end of the script; "" if it ran to its end.
    """
    told, failed = _told(record.of.values())
    ending = " ".join(filter(None, [ending or "It ran to its end." * (not failed), told]))
    if not record.of:
        ending += " No optimizer stepped under amp: the script made none, or never called amp.initialize or its like."
    parts = [header("halfstep run", script, made_by(command)), note(ending)]
    parts += _pictures(record) if record.of else []
    write_page(path, f"halfstep run: {script}", [*parts, machine_section(record.device)])


def robust_limit(seconds: Sequence[float]) -> float:
    """Choose the upper edge of a picture of step times; outliers, such as warm-up steps, lie above it."""
    nine_tenths = sorted(seconds)[int(0.9 * len(seconds))]
    return min(max(4.0 * statistics.median(seconds), 1.2 * nine_tenths), 1.1 * max(seconds))


# ---- inside

_Named = Mapping[str, OptimizerSteps]
"""The steps of each optimizer, by its name on the page."""


def _told(all_steps: Iterable[OptimizerSteps]) -> tuple[str, bool]:
    """Say how many steps were skipped, and if the last loss is not finite; True if the training has failed."""
    skipped = [each for steps in all_steps for each in steps.skipped]
    bad = [f"{steps.losses[-1]:g}".replace("nan", "NaN") for steps in all_steps if not math.isfinite(steps.losses[-1])]
    count = sum(skipped)
    told = [f"{count:,} of {counted(len(skipped), 'step')} {'was' if count == 1 else 'were'} skipped."] * (count > 0)
    return " ".join([*told, *(f"The loss is {each}." for each in bad[:1])]), bool(bad) or 2 * count > len(skipped)


def _pictures(record: Recording) -> list[Markup]:
    named = _named([*record.of.values()])
    device = "Memory is the most that was allocated on the GPU." if record.device.type == "cuda" else ""
    text = (
        "A step is from the end of the one before to its own end, with all that lies between: data, forward and "
        f"backward passes. Times are medians. {device or 'Memory is that of the process.'}"
    )
    columns = ["optimizer", "steps", "skipped", "loss scale", "step ms", "memory MiB"]
    rows = [
        [
            name,
            str(len(steps.skipped)),
            str(sum(steps.skipped)),
            ", ".join(f"{scale:g}" for scale in steps.last_scales()) or "none",
            f"{1e3 * statistics.median(steps.seconds):.1f}",
            f"{max(steps.bytes) / 2**20:.1f}",
        ]
        for name, steps in named.items()
    ]
    return [
        section("Steps", table(columns, rows), small(text)),
        section("Loss", _losses(named)),
        section("Loss scale", _scales(named)),
        section("Time", _times(named)),
        section("Memory", _memories(named)),
    ]


def _scales(named: _Named) -> Markup:
    drawn, labelled = [], {}
    for name, steps in named.items():
        for i, scales in enumerate(steps.scales.values()):
            label = name if len(steps.scales) == 1 else f"{name}, loss {i}"
            drawn.append(scale_line(label, scales, steps.skipped))
            labelled[label] = scales
    if not drawn:
        return paragraph("No loss was scaled.")
    skipped = counted(sum(sum(steps.skipped) for steps in named.values()), "step was", "steps were")
    text = (
        "What the loss of each step was multiplied by. A dynamic scale falls after an overflow, whose step is skipped: "
        "these are marked."
    )
    return scale_figure(drawn, labelled, "optimizer", f"{skipped} skipped.", text)


def _times(named: _Named) -> Markup:
    limit = max(robust_limit(steps.seconds) for steps in named.values())
    every = [(second, name, step) for name, steps in named.items() for step, second in enumerate(steps.seconds)]
    beyond = [second for second, _, _ in every if second > limit]
    text = "Milliseconds for each step."
    if beyond:
        text += (
            f" {counted(len(beyond), 'step')} took longer than the picture shows, up to {max(beyond):.3g} s, and "
            f"{'is' if len(beyond) == 1 else 'are'} marked at its upper edge."
        )
    description = f"The median is {1e3 * statistics.median(second for second, _, _ in every):.3g} ms."
    slowest = sorted(every, reverse=True)[:10]
    body = [[name, f"{step:,}", f"{1e3 * second:.4g}"] for second, name, step in slowest]
    milliseconds = {name: [1e3 * second for second in steps.seconds] for name, steps in named.items()}
    picture = _plain_lines("Time", description, milliseconds, 1e3 * limit)
    return figure(picture, numbers("The slowest steps", ["optimizer", "step", "ms"], body), caption=text)


def _memories(named: _Named) -> Markup:
    mebibytes = {name: [size / 2**20 for size in steps.bytes] for name, steps in named.items()}
    largest = max(map(max, mebibytes.values()))
    picture = _plain_lines("Memory", f"At most {largest:.4g} MiB.", mebibytes, 1.1 * largest)
    columns = ["optimizer", "first", "least", "most", "last"]
    body = [
        [name, *(f"{size:.1f}" for size in (line[0], min(line), max(line), line[-1]))]
        for name, line in mebibytes.items()
    ]
    return figure(picture, numbers("Numbers", columns, body), caption="MiB after each step.")


def _losses(named: _Named) -> Markup:
    losses = {n: [loss if math.isfinite(loss) else math.nan for loss in steps.losses] for n, steps in named.items()}
    finite = [loss for column in losses.values() for loss in column if loss == loss] or [0.0]
    told = f"From {min(finite):.4g} to {max(finite):.4g}."
    picture = _plain_lines("Loss", told, losses, max(finite), min(finite))
    text = "The loss of the latest backward pass before each step, without its scale. A gap is inf or NaN."
    return figure(picture, caption=f"{told} {text}")


def _plain_lines(
    title: str, told: str, columns: Mapping[str, Sequence[float]], high: float, low: float = 0.0
) -> Markup:
    drawn = [Line(name, list(enumerate(column))) for name, column in columns.items()]
    return lines(title, told, drawn, low=low, high=high, label=lambda at: f"{at:,g}", ticks=between(low, high))


def _named(all_steps: Sequence[OptimizerSteps]) -> _Named:
    """Name the optimizers by class, numbered if a class occurs several times."""
    return dict(zip(numbered([steps.name for steps in all_steps]), all_steps, strict=True))


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    except OSError:  # not Linux
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
