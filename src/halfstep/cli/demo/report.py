"""The demo's results as a table and as one self-contained HTML page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from halfstep.core.dtypes import dtype_name
from halfstep.core.policy import LEVELS

from ..page import log2_axis, picture, render
from .training import BATCH_SIZE, WARM_UP, Run, Settings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["summarize", "write_report"]

COLORS = {"O0": "#8a929b", "O1": "#3d85c6", "O2": "#dd8321", "O3": "#2f9e77"}
"""One color a level, of middling lightness, so that it stands out on white and on black."""


def summarize(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of the demo's table. Ratios are to the step time of O0, or of the first level."""
    base = next((run for run in runs if run.level == "O0"), runs[0])
    columns: dict[str, Callable[[Run], str]] = {
        "level": lambda run: run.level,
        "dtype": lambda run: dtype_name(run.dtype),
        "test accuracy": lambda run: f"{100 * run.test_accuracy:.1f} %",
        "final loss": lambda run: f"{run.final_loss:.4f}",
        "step ms": lambda run: f"{1e3 * run.median_step:.1f}",
        f"ratio to {base.level}": lambda run: f"{run.median_step / base.median_step:.2f}",
        "held MiB": lambda run: _mebibytes(run.held_bytes),
        "peak MiB": lambda run: _mebibytes(run.peak_bytes or 0),
        "loss scale": lambda run: f"{run.loss_scales[-1]:g}",
        "steps skipped": lambda run: str(run.steps_skipped),
    }
    if any(run.peak_bytes is None for run in runs):
        del columns["peak MiB"]
    return list(columns), [[text(run) for text in columns.values()] for run in runs]


def write_report(path: Path, runs: Sequence[Run], settings: Settings, notes: Sequence[str] = ()) -> None:
    """Write the page: table, loss curves, loss-scale traces, the machine and the versions.

    Args:
        path: the file to write.
        runs: what ``train`` returned.
        settings: what it was given.
        notes: sentences to put above the table.
    """
    header, rows = summarize(runs)
    page = render(
        "demo",
        settings.device,
        settings=settings,
        dtype=dtype_name(settings.dtype),
        header=header,
        rows=rows,
        levels={run.level: LEVELS[run.level] for run in runs},
        colors=COLORS,
        notes=notes,
        losses=_losses(runs),
        scales=_loss_scales(runs),
        scale_moved=any(len(set(run.loss_scales)) > 1 for run in runs),
        peak="peak MiB" in header,
        steps=len(runs[0].losses),
        batch_size=BATCH_SIZE,
        warm_up=WARM_UP,
        command=_command(settings),
    )
    path.write_text(page, encoding="utf-8")


def _command(settings: Settings) -> str:
    return (
        f"halfstep demo --device {settings.device.type} --dtype {dtype_name(settings.dtype)} "
        f"--levels {','.join(settings.levels)} --epochs {settings.epochs} --width {settings.width} "
        f"--seed {settings.seed}"
    )


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f}"


def _losses(runs: Sequence[Run]) -> str:
    """The smoothed losses of each level, over those of the single steps."""

    def draw(axes: Axes) -> None:
        for run in runs:
            axes.plot(run.losses, color=COLORS[run.level], alpha=0.22, linewidth=0.8)
        for run in runs:
            axes.plot(_smooth(run.losses), color=COLORS[run.level], linewidth=1.8, label=run.level)
        axes.set_yscale("log")

    return picture("loss", draw)


def _loss_scales(runs: Sequence[Run]) -> str:
    def draw(axes: Axes) -> None:
        for i, run in enumerate(runs):
            # Levels often share a scale. Thinner lines on top of thicker ones keep all of them visible.
            width = 1.6 + 1.3 * (len(runs) - 1 - i)
            axes.step(
                range(len(run.loss_scales)), run.loss_scales, color=COLORS[run.level], linewidth=width, label=run.level
            )
        log2_axis(axes)

    return picture("loss scale", draw)


def _smooth(values: Sequence[float], reach: int = 5) -> list[float]:
    """The geometric mean over ``reach`` values before and after each; a loss that is not positive stays as it is."""
    if any(not 0 < value < math.inf for value in values):
        return list(values)
    windows = (values[max(0, i - reach) : i + reach + 1] for i in range(len(values)))
    return [statistics.geometric_mean(window) for window in windows]
