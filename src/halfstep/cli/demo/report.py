"""The demo's results: a table, a self-contained HTML page, and a JSON file."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from halfstep.core.dtypes import dtype_name
from halfstep.core.hardware import has_units
from halfstep.core.policy import LEVELS
from halfstep.core.text import counted

from ...diagnostics.pages import (
    Bar,
    Line,
    Markup,
    bars,
    element,
    facts,
    figure,
    header,
    join,
    lines,
    note,
    numbers,
    paragraph,
    power,
    section,
    small,
    table,
    write_page,
    write_text,
)
from ..machine import describe_machine, machine_section
from ..scale_picture import scale_figure, scale_line
from .training import BATCH_SIZE, EPOCH_STEPS, LOSS_SCALE, WARM_UP, DemoRun, DemoSettings

__all__ = ["busy_note", "summarize", "write_report", "write_results"]


def summarize(runs: Sequence[DemoRun], device: torch.device) -> tuple[list[str], list[list[str]]]:
    """Make the header and the rows of the demo's table. Ratios are relative to O0's step time, or the first level's."""
    base = _base(runs)
    columns: dict[str, Callable[[DemoRun], str]] = {
        "level": lambda run: run.level,
        "dtype": lambda run: dtype_name(run.dtype),
        "test accuracy": lambda run: f"{100 * run.test_accuracy:.1f} %",
        "step ms": lambda run: f"{1e3 * run.median_step:.1f}±{1e3 * run.step_spread:.1f}",
        f"ratio to {base.level}": lambda run: f"{run.median_step / base.median_step:.2f}",
        "computed": lambda run: _computed(run.dtype, device),
        "final loss": lambda run: f"{run.final_loss:.4f}",
        "held MiB": lambda run: _mebibytes(run.held_bytes),
        "peak MiB": lambda run: _mebibytes(run.peak_bytes),
        "loss scale": lambda run: _scale(run.loss_scales[-1]),
        "steps skipped": lambda run: str(run.steps_skipped),
    }
    return list(columns), [[text(run) for text in columns.values()] for run in runs]


_BUSY = 0.15
"""The ratio of a step's spread to its median from which on comparisons of two levels mean little."""


def busy_note(runs: Sequence[DemoRun]) -> str:
    """Write a warning for unreliable times, caused by other programs on the machine; empty if times are reliable."""
    worst = max(runs, key=lambda run: run.step_spread / run.median_step)
    spread = worst.step_spread / worst.median_step
    if spread <= _BUSY:
        return ""
    return (
        f"The machine was busy with something else: steps of {worst.name} differ by ±{100 * spread:.0f} % from their "
        "median. Do not trust the times and ratios; run the demo again when nothing else runs."
    )


def write_results(path: Path, runs: Sequence[DemoRun], settings: DemoSettings) -> None:
    """Write the measurements as JSON, with their command and machine."""
    found: dict[str, Any] = {
        "command": _command(settings),
        "machine": describe_machine(settings.device),
        "runs": [
            {
                "level": run.level,
                "dtype": dtype_name(run.dtype),
                "computed": _computed(run.dtype, settings.device),
                "test_accuracy": run.test_accuracy,
                "final_loss": _finite(run.final_loss),
                "step_seconds": run.median_step,
                "step_spread_seconds": run.step_spread,
                "held_bytes": run.held_bytes,
                "peak_bytes": run.peak_bytes,
                "steps_skipped": run.steps_skipped,
                "losses": list(map(_finite, run.losses)),
                "loss_scales": run.loss_scales,
            }
            for run in runs
        ],
    }
    write_text(path, json.dumps(found, indent=1, allow_nan=False) + "\n")


def write_report(path: Path, runs: Sequence[DemoRun], settings: DemoSettings, notes: Sequence[str] = ()) -> None:
    """Write the page: table, bars of time and memory, losses, loss scales, the machine and the versions.

    Args:
        path: the file to write.
        runs: the result of ``train``.
        settings: the argument of ``train``.
        notes: sentences above the table.
    """
    where = "the CPU" if settings.device.type == "cpu" else "the GPU"
    levels = list(dict.fromkeys(run.level for run in runs))
    dtypes = list(dict.fromkeys(dtype_name(run.dtype) for run in runs if run.level != "O0")) or ["float32"]
    what = f"{', '.join(levels)} in {' and '.join(dtypes)}"
    about = (
        "A convolutional classifier of 1,797 handwritten digits. Each run starts from the same seed and sees the "
        f"same data in the same order: {counted(settings.epochs, 'epoch')}, that is {len(runs[0].losses)} steps of "
        f"{BATCH_SIZE} images."
    )
    sections = [
        section("Results", *_results(runs, settings.device)),
        section("Time of a step", _times(runs)),
        section("Memory", _memory(runs)),
        section("Loss", _losses(runs)),
        section("Loss scale", _loss_scales(runs)),
        section("The levels", facts({level: LEVELS[level] for level in levels})),
        section(
            "How it was measured",
            paragraph(
                "The runs take turns, an epoch each, in one process. So where the speed of the machine changes, it "
                "changes for all of them. A step is forward, backward, unscaling, update and zeroing of the gradients. "
                f"It is timed with the device idle before and after. Given is the median without the first {WARM_UP}, "
                "and ± half of the distance between the quartiles: half of the steps lie within it.",
            ),
            paragraph("Made by ", element("code", _command(settings))),
        ),
        machine_section(settings.device),
    ]
    top = header("halfstep demo", f"{what} on {where}", about)
    write_page(path, f"halfstep demo: {what}", [top, *map(note, notes), *sections])


# ---- the sections


def _results(runs: Sequence[DemoRun], device: torch.device) -> list[Markup]:
    columns, rows = summarize(runs, device)
    dots = [element("span", class_=f"dot hue{i % 8}") for i in range(len(rows))]
    body = [[join([dot, f"{level} {dtype}"]), *rest] for dot, (level, dtype, *rest) in zip(dots, rows, strict=True)]
    text = (
        "Accuracy is on 360 images that were not trained on: one image is 0.28 points. The final loss is the mean of "
        "the last epoch. Held are weights, masters, gradients, optimizer state and BatchNorm statistics. The peak of a "
        "step also counts activations."
    )
    if any("emulated" in row for row in rows):
        text += (
            " Emulated: this device has no 16-bit units for convolutions in that dtype. fp32 kernels compute them "
            "and round as the dtype does, so it learns as on a device with units, at about the speed of fp32."
        )
    shown = element("div", table(["run", *columns[2:]], body, "One row for each run"), class_="results")
    return [shown, small(text)]


def _times(runs: Sequence[DemoRun]) -> Markup:
    base = _base(runs)
    longest = max(run.median_step for run in runs)
    rows = [
        Bar(run.name, f"{1e3 * run.median_step:.1f} ± {1e3 * run.step_spread:.1f} ms", run.median_step / longest, hue=i)
        for i, run in enumerate(runs)
    ]
    ratios = ", ".join(f"{run.name} {run.median_step / base.median_step:.2f}" for run in runs if run is not base)
    described = f"{base.name} takes {1e3 * base.median_step:.1f} ms a step. Divided by that: {ratios or 'none'}."
    picture = bars("Time of a step", described, rows, mark=base.median_step / longest, value_name="median")
    return figure(picture, caption=f"Shorter is faster. The line is at {base.name}.")


def _memory(runs: Sequence[DemoRun]) -> Markup:
    base = _base(runs)
    largest = max(max(run.held_bytes, run.peak_bytes) for run in runs) or 1
    rows = [
        Bar(f"{run.name}, {what}", f"{_mebibytes(size)} MiB", size / largest, hue=i)
        for i, run in enumerate(runs)
        for what, size in (("held", run.held_bytes), ("peak", run.peak_bytes))
    ]
    told = ", ".join(f"{run.name} {_mebibytes(run.held_bytes)} and {_mebibytes(run.peak_bytes)}" for run in runs)
    described = f"Held, and at the peak of a step, in MiB: {told}."
    picture = bars("Memory", described, rows, mark=base.peak_bytes / largest, value_name="memory")
    text = (
        "Held is what is kept between steps. At O2 the weights are 16 bits wide and have fp32 masters; at O3 they have "
        f"none. The peak of a step has its activations, too. The line is at the peak of {base.name}."
    )
    return figure(picture, caption=text)


def _losses(runs: Sequence[DemoRun]) -> Markup:
    epochs = range(len(runs[0].losses) // EPOCH_STEPS)
    means = {run.name: [statistics.fmean(_of_epoch(run.losses, epoch)) for epoch in epochs] for run in runs}
    drawn = [
        Line(name, [(epoch + 1, math.log2(mean) if mean > 0 else math.nan) for epoch, mean in enumerate(values)])
        for name, values in means.items()
    ]
    exponents = [at for line in drawn for _, at in line.points if math.isfinite(at)] or [0.0]
    ends = ", ".join(f"{run.name} {run.final_loss:.2g}" for run in runs)
    told = f"{len(drawn)} lines over {len(epochs)} epochs. In the last epoch: {ends}."
    low, high = min(exponents) - 0.3, max(exponents) + 0.3
    picture = lines("Loss", told, drawn, low=low, high=high, label=lambda at: f"{2.0**at:.2g}")
    body = [[str(epoch + 1), *(f"{values[epoch]:.4f}" for values in means.values())] for epoch in epochs]
    table_of_means = numbers("Numbers", ["epoch", *means], body, "Mean of each epoch")
    return figure(picture, table_of_means, caption="The training loss, as the mean of each epoch.")


def _loss_scales(runs: Sequence[DemoRun]) -> Markup:
    # Runs with equal scales share a line.
    sharing: dict[tuple[float, ...], list[int]] = {}
    for i, run in enumerate(runs):
        sharing.setdefault(tuple(run.loss_scales), []).append(i)
    drawn = []
    for scales, indices in sharing.items():
        falls = [after < scale for scale, after in itertools.pairwise([*scales, scales[-1]])]
        drawn.append(scale_line(", ".join(runs[i].name for i in indices), scales, falls, hue=indices[0]))
    skipped = ", ".join(f"{run.name} {run.steps_skipped}" for run in runs)
    text = "What the loss of each step was multiplied by. "
    if any(len(scales) > 1 for scales in map(set, sharing)):
        text += (
            "A dynamic scale halves at each overflow, which is marked and whose step is skipped. The demo starts "
            f"float16 at {power(math.log2(LOSS_SCALE.init_scale))} and doubles the scale after "
            f"{LOSS_SCALE.growth_interval} good steps, so that a short run shows this. The defaults are "
            f"{power(16)} and 2,000, and then a scale seldom moves."
        )
    else:
        text += (
            "No scale moved. bfloat16 has the exponent range of fp32, so its gradients need no scale; a dynamic one "
            "moves when float16 gradients overflow."
        )
    return scale_figure(drawn, {run.name: run.loss_scales for run in runs}, "run", f"Steps skipped: {skipped}.", text)


# ---- inside


def _base(runs: Sequence[DemoRun]) -> DemoRun:
    """Choose the run for comparison: O0, or the first run."""
    return next((run for run in runs if run.level == "O0"), runs[0])


def _computed(dtype: torch.dtype, device: torch.device) -> str:
    """Describe the computation of convolutions, nearly all of the classifier's work, in a dtype on a device."""
    if dtype is torch.float32:
        return "fp32"
    return "units" if has_units(device, dtype, "convolution") else "emulated"


def _command(settings: DemoSettings) -> str:
    # Without --dtype the demo makes one additional run.
    dtype = "" if settings.beside is not None else f"--dtype {dtype_name(settings.dtype)} "
    return (
        f"halfstep demo --device {settings.device.type} {dtype}--levels {','.join(settings.levels)} "
        f"--epochs {settings.epochs} --width {settings.width} --seed {settings.seed}"
    )


def _finite(value: float) -> float | None:
    """Convert a number for JSON, which has neither inf nor NaN."""
    return value if math.isfinite(value) else None


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f}"


def _scale(scale: float) -> str:
    """Format a loss scale; the demo's loss scales are powers of 2."""
    exponent = math.log2(scale)
    return f"2^{exponent:.0f}" if exponent >= 10 and exponent == int(exponent) else f"{scale:g}"


def _of_epoch(values: Sequence[float], epoch: int) -> Sequence[float]:
    return values[epoch * EPOCH_STEPS : (epoch + 1) * EPOCH_STEPS]
