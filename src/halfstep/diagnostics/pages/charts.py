"""Pictures in a page: lines over steps, and strips of heat. They are plain SVG, and readable on a narrow screen.

Positions are percentages of the width and text has a fixed size, so nothing shrinks with the page. Each picture is one
image for a screen reader, with a title and a one-sentence description.
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
    """Write a power of 2, such as 2⁻²⁴."""
    return "2" + f"{exponent:.0f}".translate(_SUPERSCRIPTS)


def between(low: float, high: float) -> list[float]:
    """Choose round numbers between ``low`` and ``high`` for ticks."""
    across = high - low
    if across <= 0:
        return [low]
    rough = across / 4
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * n for n in (1, 2, 5, 10) if unit * n >= rough)
    return [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _doublings(low: float, high: float) -> list[float]:
    """Choose exponents of 2 between ``low`` and ``high`` for ticks: whole numbers that a power of 2 divides."""
    step = next(n for n in (1, 2, 4, 8, 16, 32, 64, 128) if (high - low) / n <= 6 or n == 128)
    return [float(at) for at in range(math.ceil(low / step) * step, math.floor(high) + 1, step)]


@dataclass(frozen=True)
class Line:
    """A line over steps.

    Attributes:
        name: the text in the legend.
        points: pairs (step, number). A NaN leaves a gap in the line.
        marks: pairs (step, number) that are marked with a cross.
        stairs: True if each number holds until the next step.
        hue: the index of one of the eight colors; None for the next color.
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
    """Draw lines over steps, with a legend.

    Args:
        title: the title of the picture.
        description: the content of the picture, for screen readers.
        drawn: the lines, eight at most.
        low: the number at the lower edge. Lower numbers are drawn at the edge, as marks.
        high: the number at the upper edge. Higher numbers are drawn at the edge, as marks.
        label: writes a number as text; the default reads numbers as exponents of 2.
        ticks: numbers that get a horizontal line; None chooses whole numbers.
        limit: a number that gets a separate, highlighted line.
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
    """A colored range of a strip, from ``start`` up to ``end``."""

    start: float
    end: float
    kind: str


@dataclass(frozen=True)
class Strip:
    """One row of a heat map.

    Attributes:
        name: the label of the row.
        value: the number at the end of the row, as text.
        cells: the share of values between each whole position and the next.
        kinds: maps a position to its kind, which sets the color: "normal", "low" or "high".
        bands: colored ranges behind the cells.
        marks: positions at which a line crosses the strip.
        alarming: True to highlight the number at the end of the row.
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
    """Draw rows of a heat map above one axis: the larger the share at a position, the stronger its color.

    Args:
        title: the title of the picture.
        description: the content of the picture, for screen readers.
        rows: the rows from top to bottom.
        low: the position at the left edge.
        high: the position just beyond the right edge.
        label: writes a position as text.
        value_name: the heading above the numbers at the end of the rows.
    """
    width = max(high - low, 1)

    def percent(at: float) -> float:
        return 100.0 * (min(max(at, low), high) - low) / width

    ticks = [(at, percent(at)) for at in _doublings(low, high)]
    texts = (element("text", label(at), x=f"{x:.4g}%", y=12, class_=_side(x)) for at, x in ticks)
    body = [_row("", element("svg", *texts, class_="axis", height=16, width="100%"), value_name, head=True)]
    for row in rows:
        shapes = [_box(percent(b.start), percent(b.end), f"band {b.kind}") for b in row.bands]
        top = max(row.cells.values(), default=0.0)
        for at, share in sorted(row.cells.items()):
            if share > 0.0 and low <= at < high:
                opacity = f"{0.08 + 0.92 * math.sqrt(share / top):.3g}"
                shapes.append(_box(percent(at), percent(at + 1), f"cell {row.kinds(at)}", fill_opacity=opacity))
        shapes += [_edge(percent(at)) for at in row.marks if low <= at <= high]
        body.append(_row(row.name, element("svg", *shapes, width="100%", height=16), row.value, alarming=row.alarming))
    return _image("div", title, description, join(body), class_="strips")


@dataclass(frozen=True)
class Bar:
    """One row of a bar chart.

    Attributes:
        name: the label of the row.
        value: the number at the end of the row, as text.
        length: the length of the bar, from 0 to 1.
        alarming: True to highlight the row.
        hue: the index of one of the eight line colors; None for the color of numbers.
    """

    name: str
    value: str
    length: float
    alarming: bool = False
    hue: int | None = None


def bars(title: str, description: str, rows: Sequence[Bar], *, mark: float, value_name: str) -> Markup:
    """Draw a bar chart.

    Args:
        title: the title of the picture.
        description: the content of the picture, for screen readers.
        rows: the rows from top to bottom.
        mark: the position of a line across all bars, from 0 to 1.
        value_name: the heading above the numbers at the end of the rows.
    """
    body = [_row("", element("svg", class_="axis", width="100%", height=1), value_name, head=True)]
    edge = _edge(100.0 * mark)
    for row in rows:
        kind = "cell high" if row.alarming else "cell normal" if row.hue is None else f"cell hue{row.hue % 8}"
        bar = element("rect", x=0, y=2, height=12, width=f"{100.0 * min(row.length, 1.0):.4g}%", class_=kind)
        drawn = element("svg", bar, edge, width="100%", height=16)
        body.append(_row(row.name, drawn, row.value, alarming=row.alarming))
    return _image("div", title, description, join(body), class_="strips")


def _box(start: float, end: float, kind: str, **more: object) -> Markup:
    """A box as high as its row, between two percentages of the width."""
    width = f"{max(end - start, 0.0):.4g}%"
    return element("rect", x=f"{start:.4g}%", y=0, height="100%", class_=kind, width=width, **more)


def _edge(at: float) -> Markup:
    """A line across a row, at a percentage of the width."""
    return element("line", x1=f"{at:.4g}%", x2=f"{at:.4g}%", y1=0, y2="100%", class_="edge")


def _row(name: str, drawn: Markup, value: str, *, alarming: bool = False, head: bool = False) -> Markup:
    """Lay out a name, a drawing and a number."""
    label = element("span", element("bdi", name), class_="name", title=name or None)
    end = element("span", value, class_="value alarm" if alarming else "value")
    return element("div", label, drawn, end, class_="strip head" if head else "strip")


def _image(tag: str, title: str, description: str, content: Markup, **attributes: object) -> Markup:
    """Wrap content so that a screen reader sees one image."""
    if tag != "svg":
        return element(tag, content, role="img", aria_label=f"{title}. {description}", **attributes)
    return element(tag, element("title", title), element("desc", description), content, role="img", **attributes)


def _side(percent: float) -> str:
    """Choose the alignment of the text at a position so that the text stays within the picture."""
    return "tick start" if percent < 4 else "tick end" if percent > 96 else "tick middle"


def _path(points: Iterable[tuple[float, float]]) -> str:
    """Write the SVG path through points, with a gap at each NaN."""
    data, pen = [], "M"
    for x, y in points:
        if math.isnan(y):
            pen = "M"
            continue
        data.append(f"{pen}{x:.5g} {y:.4g}")
        pen = "L"
    return "".join(data)


def _stairs(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Insert points so that each number holds until the next step."""
    between = [(after[0], before[1]) for before, after in itertools.pairwise(points)]
    return [each for pair in itertools.zip_longest(points, between) for each in pair if each is not None]
