"""Pictures in a page: lines over steps, and strips of heat. They are plain SVG, and readable on a narrow screen.

Positions are percentages of the width and sizes of text are not, so nothing shrinks with the page. Each picture is one
image for a screen reader, with a title and a sentence on what is in it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .html import Markup, element, join

__all__ = ["Band", "Bar", "Line", "Strip", "bars", "between", "lines", "power", "strips"]

_HEIGHT = 220  # of a plot, in CSS pixels
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def power(exponent: float) -> str:
    """A power of 2 as text, such as 2⁻²⁴."""
    return "2" + f"{exponent:.0f}".translate(_SUPERSCRIPTS)


def between(low: float, high: float) -> list[float]:
    """Some round numbers from one number to another, for ticks."""
    across = high - low
    if across <= 0:
        return [low]
    rough = across / 4
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * n for n in (1, 2, 5, 10) if unit * n >= rough)
    return [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _doublings(low: float, high: float) -> list[float]:
    """Some exponents of 2 from one to another, for ticks: whole numbers that a power of 2 divides."""
    step = next(n for n in (1, 2, 4, 8, 16, 32, 64, 128) if (high - low) / n <= 6 or n == 128)
    return [float(at) for at in range(math.ceil(low / step) * step, math.floor(high) + 1, step)]


@dataclass(frozen=True)
class Line:
    """A line over steps.

    Attributes:
        name: for the legend.
        points: (step, number). Where a number is NaN the line has a gap.
        marks: (step, number) that get a cross.
        stairs: whether numbers hold until the next step.
        hue: which of the eight colors; None for the next one.
    """

    name: str
    points: Sequence[tuple[float, float]]
    marks: Sequence[tuple[float, float]] = ()
    stairs: bool = False
    hue: int | None = None


def lines(
    title: str,
    description: str,
    drawn: Sequence[Line],
    *,
    low: float,
    high: float,
    label: Callable[[float], str] = power,
    ticks: Sequence[float] | None = None,
    limit: float | None = None,
) -> Markup:
    """Lines over steps, with a legend.

    Args:
        title: of the picture.
        description: what is in it, for those who cannot see it.
        drawn: the lines, eight at most.
        low: the number at the lower edge. What lies below is drawn at the edge, as a mark.
        high: the number at the upper edge. What lies above is drawn at the edge, as a mark.
        label: a number as text; without one numbers are exponents of 2.
        ticks: which numbers get a line across; None for some whole ones.
        limit: a number with a line of its own.
    """
    steps = [step for line in drawn for step, _ in line.points]
    first, last = min(steps, default=0), max(steps, default=0)
    across = max(last - first, 1)
    room = max(high - low, 1e-30)

    def x(step: float) -> float:
        return 100.0 * (step - first) / across

    def y(value: float) -> float:
        return _HEIGHT * (1.0 - (min(max(value, low), high) - low) / room)

    parts: list[str] = []
    for tick in _doublings(low, high) if ticks is None else ticks:
        parts.append(element("line", x1=0, x2="100%", y1=y(tick), y2=y(tick), class_="rule"))
        parts.append(element("text", label(tick), x=-8, y=y(tick) + 4, class_="tick end"))
    for step in [tick for tick in between(first, last) if tick == round(tick)]:
        parts.append(element("text", f"{step:,.0f}", x=f"{x(step):.4g}%", y=_HEIGHT + 18, class_=_side(x(step))))
    if limit is not None:
        parts.append(element("line", x1=0, x2="100%", y1=y(limit), y2=y(limit), class_="limit"))
    hues = [f"hue{(i if line.hue is None else line.hue) % 8}" for i, line in enumerate(drawn)]
    paths = []
    for line, hue in zip(drawn, hues, strict=True):
        data = _path([(10.0 * x(step), y(value) if math.isfinite(value) else math.nan) for step, value in line.points])
        if line.stairs:
            data = _path(_stairs([(10.0 * x(step), y(value)) for step, value in line.points]))
        paths.append(element("path", d=data, class_=f"line {hue}", vector_effect="non-scaling-stroke"))
    box = f"0 0 1000 {_HEIGHT}"
    parts.append(element("svg", *paths, viewBox=box, preserveAspectRatio="none", width="100%", height=_HEIGHT))
    for line, hue in zip(drawn, hues, strict=True):
        if len(line.points) == 1:
            ((step, value),) = line.points
            parts.append(element("circle", cx=f"{x(step):.4g}%", cy=y(value), r=3, class_=f"mark {hue}"))
        outside = [(s, v) for s, v in line.points if v > high or (v < low and v == v)]
        for step, value in [*line.marks, *outside]:
            text = "▲" if value > high else "▼" if value < low else "x"
            at = y(value) + (9 if text == "▲" else 0 if text == "▼" else 5)
            parts.append(element("text", text, x=f"{x(step):.4g}%", y=at, class_=f"mark {hue}"))
    picture = _image("svg", title, description, join(parts), class_="plot", height=_HEIGHT + 24)
    named = zip(drawn, hues, strict=True)
    entries = (element("li", element("span", class_=f"dot {hue}"), line.name) for line, hue in named)
    return join([picture, element("ul", *entries, class_="legend")])


@dataclass(frozen=True)
class Band:
    """The meaning of a part of a strip, from one position up to another."""

    start: float
    end: float
    kind: str


@dataclass(frozen=True)
class Strip:
    """One row of heat.

    Attributes:
        name: of the row.
        value: a number at its end, as text.
        cells: which share lies at each whole position, up to the next one.
        kinds: the kind of a position, which decides on its color: "normal", "low" or "high".
        bands: behind the cells.
        marks: positions with a line through the strip.
        alarming: whether the number at its end stands out.
    """

    name: str
    value: str
    cells: Mapping[int, float]
    kinds: Callable[[int], str]
    bands: Sequence[Band] = ()
    marks: Sequence[float] = ()
    alarming: bool = field(default=False)


def strips(
    title: str,
    description: str,
    rows: Sequence[Strip],
    *,
    low: int,
    high: int,
    label: Callable[[float], str] = power,
    value_name: str,
) -> Markup:
    """Rows of heat above one axis: the more lies at a position, the stronger is its color.

    Args:
        title: of the picture.
        description: what is in it, for those who cannot see it.
        rows: from top to bottom.
        low: the position at the left edge.
        high: the position behind the right edge.
        label: a position as text.
        value_name: what the numbers at the end of the rows are.
    """
    width = max(high - low, 1)

    def percent(at: float) -> float:
        return 100.0 * (min(max(at, low), high) - low) / width

    axis = element(
        "svg",
        *(
            element("text", label(at), x=f"{percent(at):.4g}%", y=12, class_=_side(percent(at)))
            for at in _doublings(low, high)
        ),
        class_="axis",
        height=16,
        width="100%",
    )
    body = [_row("", axis, value_name, head=True)]
    for row in rows:
        top = max(row.cells.values(), default=0.0)
        shapes: list[str] = [
            element(
                "rect",
                x=f"{percent(b.start):.4g}%",
                y=0,
                height="100%",
                class_=f"band {b.kind}",
                width=f"{max(percent(b.end) - percent(b.start), 0.0):.4g}%",
            )
            for b in row.bands
        ]
        shapes += [
            element("rect", x=f"{percent(at):.4g}%", width=f"{100.0 / width:.4g}%", y=0, height="100%",
                    class_=f"cell {row.kinds(at)}", fill_opacity=f"{0.08 + 0.92 * math.sqrt(share / top):.3g}")
            for at, share in sorted(row.cells.items())
            if share > 0.0 and low <= at < high
        ]  # fmt: skip
        shapes += [
            element("line", x1=f"{percent(at):.4g}%", x2=f"{percent(at):.4g}%", y1=0, y2="100%", class_="edge")
            for at in row.marks
            if low <= at <= high
        ]
        drawn = element("svg", *shapes, width="100%", height=16)
        body.append(_row(row.name, drawn, row.value, alarming=row.alarming))
    return _image("div", title, description, join(body), class_="strips")


@dataclass(frozen=True)
class Bar:
    """One row of bars.

    Attributes:
        name: of the row.
        value: the number at its end, as text.
        length: of the bar, from 0 to 1.
        alarming: whether it stands out.
        hue: which of the eight colors of lines; None for the color of numbers.
    """

    name: str
    value: str
    length: float
    alarming: bool = False
    hue: int | None = None


def bars(title: str, description: str, rows: Sequence[Bar], *, mark: float, value_name: str) -> Markup:
    """Rows of bars.

    Args:
        title: of the picture.
        description: what is in it, for those who cannot see it.
        rows: from top to bottom.
        mark: where a line goes through all of them, from 0 to 1.
        value_name: what the numbers at the end of the rows are.
    """
    body = [_row("", element("svg", class_="axis", width="100%", height=1), value_name, head=True)]
    edge = element("line", x1=f"{100.0 * mark:.4g}%", x2=f"{100.0 * mark:.4g}%", y1=0, y2="100%", class_="edge")
    for row in rows:
        kind = "cell high" if row.alarming else "cell normal" if row.hue is None else f"cell hue{row.hue % 8}"
        bar = element("rect", x=0, y=2, height=12, width=f"{100.0 * min(row.length, 1.0):.4g}%", class_=kind)
        drawn = element("svg", bar, edge, width="100%", height=16)
        body.append(_row(row.name, drawn, row.value, alarming=row.alarming))
    return _image("div", title, description, join(body), class_="strips")


def _row(name: str, drawn: Markup, value: str, *, alarming: bool = False, head: bool = False) -> Markup:
    """A name, what is drawn, and a number."""
    label = element("span", element("bdi", name), class_="name", title=name or None)
    end = element("span", value, class_="value alarm" if alarming else "value")
    return element("div", label, drawn, end, class_="strip head" if head else "strip")


def _image(tag: str, title: str, description: str, content: Markup, **attributes: object) -> Markup:
    """One image for a screen reader."""
    if tag != "svg":
        return element(tag, content, role="img", aria_label=f"{title}. {description}", **attributes)
    return element(tag, element("title", title), element("desc", description), content, role="img", **attributes)


def _side(percent: float) -> str:
    """How the text at a position is aligned, so that it stays within the picture."""
    return "tick start" if percent < 4 else "tick end" if percent > 96 else "tick middle"


def _path(points: Iterable[tuple[float, float]]) -> str:
    """A path through points, with a gap at each NaN."""
    data, pen = [], "M"
    for x, y in points:
        if math.isnan(y):
            pen = "M"
            continue
        data.append(f"{pen}{x:.5g} {y:.4g}")
        pen = "L"
    return "".join(data)


def _stairs(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points in between, so that each number holds until the next step."""
    between = [(after[0], before[1]) for before, after in itertools.pairwise(points)]
    return [each for pair in itertools.zip_longest(points, between) for each in pair if each is not None]
