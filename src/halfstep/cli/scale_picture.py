"""The picture of loss scales, step by step, on the pages of ``halfstep demo`` and ``halfstep run --report``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ..diagnostics.pages import Line, Markup, figure, lines, numbers, power

__all__ = ["scale_figure", "scale_line"]


def scale_line(label: str, scales: Sequence[float], marked: Sequence[bool], hue: int | None = None) -> Line:
    """Make the line of a loss scale, as powers of 2.

    Args:
        label: the name of its run or optimizer.
        scales: one scale per step; NaN if no loss was scaled.
        marked: the steps to mark.
        hue: see ``Line``.
    """
    points = [(step, math.log2(scale)) for step, scale in enumerate(scales) if scale == scale]
    return Line(label, points, [point for point in points if marked[point[0]]], stairs=True, hue=hue)


def scale_figure(
    drawn: Sequence[Line], scales: Mapping[str, Sequence[float]], owner: str, told: str, text: str
) -> Markup:
    """Make the picture, with a table of the changes.

    Args:
        drawn: the results of ``scale_line``.
        scales: the scales of each step by name of run or optimizer, for the table.
        owner: the kind of these names: "run" or "optimizer".
        told: a description for screen readers.
        text: the text below the picture.
    """
    exponents = [value for line in drawn for _, value in line.points]
    low, high = min(math.floor(min(exponents)), 0) - 1.0, max(math.ceil(max(exponents)), 0) + 1.0
    told = f"From {min(exponents):.0f} to {max(exponents):.0f} as powers of 2. {told}"
    picture = lines("Loss scale", told, drawn, low=low, high=high)
    changes = []
    for label, line in scales.items():
        before = None
        for step, scale in enumerate(line):
            if scale == scale and scale != before:
                changes.append([label, f"{step:,}", f"{scale:g}" if scale < 1e6 else power(math.log2(scale))])
                before = scale
    return figure(picture, numbers("Changes", [owner, "from step", "scale"], changes), caption=text)
