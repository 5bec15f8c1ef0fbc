"""The report of ``halfstep run --report``: loss scale, skipped steps, time and memory of every step of a script."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..stepping.attached import AttachedOptimizer, observers
from .page import log2_axis, picture, render

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Recording", "recording", "write_report"]

_COLORS = ("#3d85c6", "#dd8321", "#2f9e77", "#8a929b")


@dataclass
class Steps:
    """The steps of one optimizer: each list has an entry for each of them.

    Attributes:
        name: the optimizer's class.
        scales: the scales of its losses before the step, 1.0 where nothing is scaled.
        skipped: whether the step was skipped.
        seconds: since the end of the step before; for the first one, since the recording began.
        bytes: the most that was allocated on the GPU, or what is resident in the process.
    """

    name: str
    scales: list[list[float]] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)


class Recording:
    """An observer that records the steps of all optimizers under amp.

    Attributes:
        steps: one ``Steps`` for each optimizer, in the order of their first steps.
        device: the device of the optimizer that stepped last.
    """

    def __init__(self) -> None:
        self.steps: list[Steps] = []
        self.device = torch.device("cpu")
        self._of: dict[int, tuple[AttachedOptimizer, Steps]] = {}
        self._before: tuple[list[float], int] = ([], 0)
        self._last = time.perf_counter()

    def before_step(self, attached: AttachedOptimizer) -> None:
        """Note the scales and the skipped steps. Reads the device."""
        self._before = _scales(attached), attached.stepping.skipped

    def after_step(self, attached: AttachedOptimizer) -> None:
        """Record the step. Reads the device."""
        scales, skipped = self._before
        if id(attached) not in self._of:
            self._of[id(attached)] = attached, Steps(type(attached.optimizer).__name__)
            self.steps.append(self._of[id(attached)][1])
        steps = self._of[id(attached)][1]
        self.device = attached.device
        steps.scales.append(scales)
        steps.skipped.append(attached.stepping.skipped > skipped)
        steps.bytes.append(_memory(self.device))
        now = time.perf_counter()
        steps.seconds.append(now - self._last)
        self._last = now


@contextmanager
def recording() -> Iterator[Recording]:
    """Record every step of every optimizer that goes through amp in this block."""
    record = Recording()
    observers.append(record)
    try:
        yield record
    finally:
        observers.remove(record)


def write_report(path: Path, record: Recording, script: str, command: Sequence[str], ending: str) -> None:
    """Write the page.

    Args:
        path: the file; its folder is made.
        record: the steps.
        script: the name of the script.
        command: the command line.
        ending: how the script ended, in a sentence.
    """
    if not record.steps:
        ending += " No optimizer stepped under amp: the script made none, or never called amp.initialize or its like."
    header = ["optimizer", "steps", "skipped", "loss scale", "step ms", "memory MiB"]
    rows = [
        [
            steps.name,
            str(len(steps.skipped)),
            str(sum(steps.skipped)),
            ", ".join(f"{scale:g}" for scale in steps.scales[-1]),
            f"{1e3 * statistics.median(steps.seconds):.1f}",
            f"{max(steps.bytes) / 2**20:.1f}",
        ]
        for steps in record.steps
    ]
    cuda = record.device.type == "cuda"
    page = render(
        "run",
        record.device,
        script=script,
        command=" ".join(command),
        ending=ending,
        header=header,
        rows=rows,
        memory_note="Memory is the most that was allocated on the GPU." if cuda else "Memory is the process's own.",
        scales=_picture("loss scale", record, _draw_scales),
        times=_picture("ms", record, lambda axes, s, color: axes.plot([1e3 * t for t in s.seconds], color=color)),
        memory=_picture("MiB", record, lambda axes, s, color: axes.plot([b / 2**20 for b in s.bytes], color=color)),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


def _picture(ylabel: str, record: Recording, draw: Any) -> str:
    def all_of_them(axes: Axes) -> None:
        for i, steps in enumerate(record.steps):
            draw(axes, steps, _COLORS[i % len(_COLORS)])
            axes.plot([], color=_COLORS[i % len(_COLORS)], label=steps.name)
        if ylabel == "loss scale":
            log2_axis(axes)

    return picture(ylabel, all_of_them) if record.steps else ""


def _draw_scales(axes: Axes, steps: Steps, color: str) -> None:
    for i in range(max(map(len, steps.scales))):
        line = [scales[min(i, len(scales) - 1)] for scales in steps.scales]
        axes.step(range(len(line)), line, color=color)
        marks = [at for at, skipped in enumerate(steps.skipped) if skipped]
        axes.plot(marks, [line[at] for at in marks], "x", color=color)


def _scales(attached: AttachedOptimizer) -> list[float]:
    scalers = [record.scaler for record in attached.passes.records if record.scaler is not None]
    if attached.session is not None:
        scalers = getattr(attached.session, "loss_scalers", scalers)
    return [scaler.loss_scale() for scaler in dict.fromkeys(scalers)] or [1.0]


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # not Linux
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return pages * 4096
