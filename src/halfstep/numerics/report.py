"""The report of a run: pictures of where its numbers lie, how far they are from overflow, and what rounds away."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from ..core.dtypes import HALF_DTYPES
from ..core.errors import ArgumentValueError
from ..core.text import counted, listed
from ..observe.row import Row
from ..pages import (
    Band,
    Line,
    Markup,
    Strip,
    element,
    figure,
    header,
    key,
    lines,
    made_by,
    numbers,
    paragraph,
    power,
    section,
    strips,
    write_page,
)
from .alarms import Alarms, first_bad
from .overview import Grid, Tensor, grids, tensors_of

__all__ = ["write_report"]

T = TypeVar("T")

_NOTHING = "\N{EN DASH}"
_MOST_ROWS = 48  # of a picture
_HALF = {str(dtype).removeprefix("torch.") for dtype in HALF_DTYPES}
_NAMES = {
    "output": "Outputs",
    "output_grad": "Gradients of outputs",
    "grad": "Gradients of parameters",
}
_COLORS = (
    ("cell normal", "numbers"),
    ("band range", "the range of the dtype"),
    ("cell low", "below the normal range: fewer digits"),
    ("band subnormal", "the subnormal part"),
    ("cell high", "one doubling from overflow"),
)
_TINY = 1e-3  # share of a row below which an exponent does not widen the picture


def write_report(
    rows: Iterable[Row], path: str | Path, *, title: str = "Numerics of a run", command: str | None = None
) -> None:
    """Write one self-contained HTML page with pictures of a run, and a table beside each.

    Args:
        rows: of the run.
        path: the file; missing folders are made.
        title: its heading.
        command: what made the rows, to be shown.

    Raises:
        ArgumentValueError: if there are no rows.
    """
    found = list(rows)
    if not found:
        raise ArgumentValueError("There are no rows to report on: the run ended before a step that was looked at.")
    write_page(path, title, _content(found, title, command))


def _content(rows: Sequence[Row], title: str, command: str | None) -> list[Markup]:
    tensors = tensors_of(rows)
    lost = grids(rows)
    steps = sorted({row.step for row in rows})
    span = f"step {steps[0]:,}" if len(steps) == 1 else f"{len(steps)} steps from {steps[0]:,} to {steps[-1]:,}"
    dtypes = ", ".join(sorted({row.dtype for row in rows}))
    about = f"{counted(len(tensors), 'tensor')} of {span}, in {dtypes}."
    parts = [header("halfstep numerics", title, made_by(command), about)]
    parts += [section("What stands out", _findings(rows, tensors, lost))]
    for kind in _NAMES:
        of_kind = [each for each in tensors if each.kind == kind and each.exponents]
        if of_kind:
            parts.append(section(f"{_NAMES[kind]}: where the numbers lie", _exponents(kind, of_kind)))
    parts.append(section("Headroom over time", *_headroom(tensors)))
    if lost:
        parts.append(section("Updates against the grid of the weights", _grid(lost)))
    return parts


# ---- the sections


def _findings(rows: Sequence[Row], tensors: Sequence[Tensor], lost: Sequence[Grid]) -> Markup:
    """The worst of each kind, in a sentence; what is likely to be the cause of others first."""
    alarms = Alarms()
    for _, of_step in itertools.groupby(sorted(rows, key=lambda row: row.step), key=lambda row: row.step):
        alarms.add(list(of_step))
    advice = {each.code: f"{each.where}: {each.message}. To do: {each.fix}." for each in alarms.findings()}
    said = [text for code, text in advice.items() if code == "HS120"]
    bad = [(row, each) for each in tensors if (row := each.bad) is not None]
    if bad:
        first = min(row.step for row, _ in bad)
        names = [f"{each.name} ({each.kind})" for row, each in bad if row.step == first]
        origin = first_bad(row for row in rows if row.step == first)
        began = f" It began inside of {origin.began_in}." if origin is not None and origin.began_in else ""
        said.append(f"inf or NaN first at step {first:,}: in {listed(names)}.{began}")
        if list(advice)[:1] == ["HS116"]:
            said.reverse()
    said += [text for code, text in advice.items() if code == "HS121"]
    near = [each for each in tensors if each.kind == "output" and 0.0 <= each.headroom < 2.0]
    if near:
        worst = min(near, key=lambda each: each.headroom)
        others = f" {len(near)} outputs came within a factor of 4." if len(near) > 1 else ""
        said.append(
            f"{worst.name} ({worst.kind}) came within a factor of {2.0**worst.headroom:.2g} of the largest "
            f"{worst.last.dtype}.{others}"
        )
    flushed = [each for each in tensors if each.mean(lambda row: row.flushed) >= 0.01]
    if flushed:
        worst = max(flushed, key=lambda each: each.mean(lambda row: row.flushed))
        others = f" {len(flushed)} tensors lose 1 % or more." if len(flushed) > 1 else ""
        said.append(
            f"{_percent(worst.mean(lambda row: row.flushed))} of {worst.name} ({worst.kind}) became 0, because it is "
            f"too small for {worst.last.dtype}, as estimated.{others}"
        )
    rounded = [each for each in lost if each.lost >= 0.5]
    if rounded:
        worst_grid = max(rounded, key=lambda each: each.lost)
        others = f" {len(rounded)} of {len(lost)} parameters lose half of theirs or more." if len(rounded) > 1 else ""
        said.append(
            f"{_percent(worst_grid.lost)} of the updates of {worst_grid.name} are too small to change a number in "
            f"{worst_grid.dtype}.{others}"
        )
    if not said:
        return paragraph("Nothing: no overflow, nothing close to one, and few numbers that are too small.")
    return element("ul", *(element("li", text) for text in said))


class _Range:
    """Where the numbers of a row lie in its dtype, by exponents of numbers without their loss scale."""

    def __init__(self, row: Row) -> None:
        finfo = torch.finfo(getattr(torch, row.dtype))
        self.shift = round(math.log2(row.scale))
        self.subnormal = round(math.log2(finfo.smallest_normal * finfo.eps)) - self.shift
        self.normal = round(math.log2(finfo.smallest_normal)) - self.shift
        self.end = round(math.log2(finfo.max)) - self.shift

    def kind(self, exponent: int) -> str:
        return "low" if exponent < self.normal else "high" if exponent >= self.end - 1 else "normal"

    def bands(self) -> list[Band]:
        return [Band(self.subnormal, self.normal, "subnormal"), Band(self.normal, self.end, "range")]


def _exponents(kind: str, tensors: Sequence[Tensor]) -> Markup:
    shown = _foremost(tensors, lambda each: each.headroom if kind == "output" else -each.mean(_low))
    ranges = [_Range(each.last) for each in shown]
    narrow = [each for each, row in zip(ranges, shown, strict=True) if row.last.dtype == "float16"]
    low, high = _limits(
        [each.exponents for each in shown],
        [at for each in narrow for at in (each.subnormal, each.end)],
    )
    rows = []
    for each, within in zip(shown, ranges, strict=True):
        total = sum(each.exponents.values())
        share = each.mean(_low)
        rows.append(
            Strip(
                each.name,
                _power_or_none(each.headroom) if kind == "output" else _percent(share),
                {at: count / total for at, count in each.exponents.items()},
                within.kind,
                within.bands(),
                [within.subnormal + within.shift] if within.shift else [],
                alarming=each.headroom < 1.0 if kind == "output" else share >= 0.1,
            )
        )
    scaled = [each.last.scale for each in shown if each.last.scale != 1.0]
    text = "Each row is a tensor, over all steps: the more of its numbers have an exponent, the stronger is the color."
    if len(shown) < len(tensors):
        worst = "the least headroom" if kind == "output" else "the most small numbers"
        text += f" These are the {len(shown)} of {len(tensors)} with {worst}."
    if scaled:
        text += (
            f" Numbers are shown without the loss scale. It was {power(math.log2(scaled[-1]))} at last, and moves the "
            "range of the dtype to the left. Without it, all that is left of the dashed line would have become 0."
        )
    value_name = "headroom" if kind == "output" else "small"
    description = (
        f"{counted(len(shown), 'tensor')}. "
        f"The least headroom is {_power_or_none(min(each.headroom for each in shown))} in "
        f"{min(shown, key=lambda each: each.headroom).name}. The numbers are in the table below."
    )
    picture = strips(_NAMES[kind], description, rows, low=low, high=high, value_name=value_name)
    return figure(
        key(*_COLORS),
        picture,
        numbers(f"Numbers of {counted(len(tensors), 'tensor')}", *_table(tensors)),
        caption=text,
    )


def _table(tensors: Sequence[Tensor]) -> tuple[list[str], list[list[str]], str]:
    names = ["tensor", "dtype", "largest", "rms", "headroom", "subnormal", "flushed", "zeros", "inf", "NaN"]
    body = [
        [
            each.name,
            each.last.dtype,
            f"{max((row.amax for row in each.rows), key=lambda v: math.inf if math.isnan(v) else v):.3g}",
            f"{each.last.rms:.3g}",
            _power_or_none(each.headroom),
            *(
                _percent(each.mean(share))
                for share in (
                    lambda row: row.subnormal,
                    lambda row: row.flushed,
                    lambda row: row.zeros,
                    lambda row: row.overflow,
                    lambda row: row.nan,
                )
            ),
        ]
        for each in tensors
    ]
    caption = "Largest and headroom are the worst of all steps, rms is of the last one, and shares are means."
    return names, body, caption


def _headroom(tensors: Sequence[Tensor]) -> list[Markup]:
    those = [each for each in tensors if each.kind in _NAMES]
    those = [each for each in those if each.last.dtype in _HALF] or those
    worst: dict[tuple[str, str], dict[int, tuple[float, str]]] = defaultdict(dict)
    for each in those:
        for row in each.rows:
            at = worst[each.kind, row.dtype]
            if row.step not in at or row.headroom < at[row.step][0]:
                at[row.step] = row.headroom, each.name
    finite = [room for at in worst.values() for room, _ in at.values() if math.isfinite(room)]
    if not finite:
        return [paragraph("No number of these tensors is finite and other than 0.")]
    high = max(8.0, 4.0 * math.ceil(max(finite) / 4.0))
    low = -1.0
    drawn = [
        Line(
            f"{_NAMES[kind]}, {dtype}",
            [(step, -2.0 if room == -math.inf else math.nan if room == math.inf else room) for step, (room, _) in at],
        )
        for (kind, dtype), at in ((key, sorted(at.items())) for key, at in worst.items())
    ]
    step = next(n for n in (2, 4, 8, 16, 32, 64) if high / n <= 6 or n == 64)
    least = sorted(those, key=lambda each: each.headroom)
    steps = len({row.step for each in those for row in each.rows})
    description = (
        f"{counted(len(drawn), 'line')} over {counted(steps, 'step')}. "
        f"The least headroom is {_power_or_none(least[0].headroom)}, in "
        f"{least[0].name} ({least[0].kind})."
    )
    picture = lines(
        "Headroom over time",
        description,
        drawn,
        low=low,
        high=high,
        label=lambda at: power(at) if at else "overflow",
        ticks=[float(at) for at in range(0, int(high) + 1, step)],
        limit=0.0,
    )
    names = ["tensor", "kind", "dtype", "least headroom", "at step", "at last"]
    body = []
    for each in least[:12]:
        row = min(each.rows, key=lambda row: row.headroom)
        rooms = _power_or_none(row.headroom), f"{row.step:,}", _power_or_none(each.last.headroom)
        body.append([each.name, each.kind, each.last.dtype, *rooms])
    text = (
        "By which factor the largest number could grow before it overflows, of the tensor that has the least, at each "
        "step. A mark at the lower edge is a step with inf or NaN."
    )
    return [figure(picture, numbers("The tensors with the least headroom", names, body, "Least first."), caption=text)]


def _grid(lost: Sequence[Grid]) -> Markup:
    shown = _foremost(lost, lambda each: -each.lost)
    low, high = _limits([each.shares for each in shown], [-2, 2])
    rows = [
        Strip(
            each.name,
            _percent(each.lost),
            each.shares,
            lambda at: "low" if at < 0 else "normal",
            marks=[0.0],
            alarming=each.lost >= 0.5,
        )
        for each in shown
    ]
    whole = sum(each.lost for each in lost) / len(lost)
    text = (
        "How large the updates are, measured in half of the distance from a weight to the next number of its dtype. "
        "Left of the line they round to nothing. Weights are what the optimizer steps: fp32 masters, where there are "
        "some. Sizes of updates and weights are taken as independent, and updates of 0 are left out."
    )
    if len(shown) < len(lost):
        text += f" These are the {len(shown)} of {len(lost)} parameters that lose the most."
    description = f"{counted(len(shown), 'parameter')}. On average {_percent(whole)} of the updates are lost."
    picture = strips(
        "Updates against the grid of the weights", description, rows, low=low, high=high, value_name="lost"
    )
    body = [[each.name, each.dtype, _percent(each.lost)] for each in lost]
    caption = "The share of updates that change nothing."
    shares = numbers(f"Numbers of {counted(len(lost), 'parameter')}", ["parameter", "dtype", "lost"], body, caption)
    colors = key(("cell low", "rounds to nothing"), ("cell normal", "changes the weight"))
    return figure(colors, picture, shares, caption=text)


# ---- inside


def _low(row: Row) -> float:
    return row.subnormal + row.flushed


def _foremost(items: Sequence[T], rank: Callable[[T], float]) -> list[T]:
    """The items that fit into a picture, those of the lowest rank, in their own order."""
    if len(items) <= _MOST_ROWS:
        return list(items)

    def of(i: int) -> float:
        value = rank(items[i])
        return math.inf if math.isnan(value) else value

    return [items[i] for i in sorted(sorted(range(len(items)), key=of)[:_MOST_ROWS])]


def _limits(
    histograms: Sequence[dict[int, float]] | Sequence[dict[int, int]], others: Sequence[int]
) -> tuple[int, int]:
    """From where to where a picture reaches, so that all but a few of the numbers are in it."""
    seen = list(others)
    for counts in histograms:
        total = sum(counts.values())
        seen += [at for at, count in counts.items() if count >= _TINY * total]
    return min(seen) - 1, max(seen) + 2


def _percent(share: float) -> str:
    if math.isnan(share):
        return _NOTHING
    return "0" if share == 0.0 else "<0.1 %" if share < 0.001 else f"{100.0 * share:.3g} %"


def _power_or_none(exponent: float) -> str:
    return "none" if exponent < 0.0 else _NOTHING if math.isinf(exponent) else power(exponent)
