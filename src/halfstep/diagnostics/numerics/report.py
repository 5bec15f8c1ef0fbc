"""The report of a run: pictures of its exponents and its headroom, and tables of its numbers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

from ...core.dtypes import HALF_DTYPES
from ...core.errors import ArgumentValueError
from ...core.text import counted, listed
from ..findings.finding import Finding
from ..observe.row import Range, Row
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
from .alarms import findings_in
from .overview import Tensor, tensors_of

__all__ = ["write_report"]

T = TypeVar("T")

_NOTHING = "\N{EN DASH}"
_MOST_ROWS = 48  # in a picture
_HALF = {str(dtype).removeprefix("torch.") for dtype in HALF_DTYPES}
_NAMES = {"output": "Outputs", "output_grad": "Gradients of outputs", "grad": "Gradients of parameters"}
_RANKS = {"output": ("headroom", "the least headroom"), "update": ("unchanged", "the most unchanged weights")}
_UNCHANGED = 0.5  # share of the weights that an update leaves unchanged; from here on it stands out
_COLORS = (
    ("cell normal", "numbers"),
    ("band range", "the range of the dtype"),
    ("cell low", "below the normal range: fewer digits"),
    ("band subnormal", "the subnormal part"),
    ("cell high", "one doubling from overflow"),
)
_zeros: Callable[[Row], float] = attrgetter("zeros")
_TINY = 1e-3  # share of a row below which an exponent does not widen the picture


def write_report(
    rows: Iterable[Row],
    path: str | Path,
    *,
    title: str = "Numerics of a run",
    command: str | None = None,
    findings: Sequence[Finding] = (),
) -> None:
    """Write one self-contained HTML page with the pictures of a run and their tables.

    Args:
        rows: the rows of the run.
        path: the file; missing folders are created.
        title: the heading of the page.
        command: the command that made the rows, shown on the page.
        findings: more findings to show than the rows give.

    Raises:
        ArgumentValueError: if there are no rows.
    """
    found = list(rows)
    if not found:
        raise ArgumentValueError("There are no rows to report on: the run ended before the first sampled step.")
    write_page(path, title, _content(found, title, command, findings))


def _content(rows: Sequence[Row], title: str, command: str | None, more: Sequence[Finding]) -> list[Markup]:
    tensors = tensors_of(rows)
    steps = sorted({row.step for row in rows})
    span = f"step {steps[0]:,}" if len(steps) == 1 else f"{len(steps)} steps from {steps[0]:,} to {steps[-1]:,}"
    dtypes = ", ".join(sorted({row.dtype for row in rows}))
    about = f"{counted(len(tensors), 'tensor')} of {span}, in {dtypes}."
    stands_out = section("What stands out", _findings([*findings_in(rows), *more], rows, tensors))
    parts = [header("halfstep numerics", title, made_by(command), about), stands_out]
    for kind, name in [*_NAMES.items(), ("update", "Updates")]:
        of_kind = [each for each in tensors if each.kind == kind]
        if any(each.exponents for each in of_kind):
            parts.append(section(f"{name}: the distribution of exponents", _exponents(kind, name, of_kind)))
    parts.append(section("Headroom over time", *_headroom(tensors)))
    return parts


# ---- the sections


def _findings(found: Sequence[Finding], rows: Sequence[Row], tensors: Sequence[Tensor]) -> Markup:
    """Make the section of findings: from a ``Monitor``'s rules, the likely cause first, and from the whole run."""
    said = [f"{e.code} {e.severity} at {e.where}: {e.message.rstrip('.')}. Fix: {e.fix.rstrip('.')}." for e in found]
    bad = [row for row in rows if not row.is_finite]
    if bad and not any(each.code == "HS116" and each.severity == "error" for each in found):
        first = min(row.step for row in bad)
        names = [f"{row.module} ({row.tensor})" for row in bad if row.step == first]
        said.append(f"inf or NaN first at step {first:,}: in {listed(names)}.")
    updates = [each for each in tensors if each.kind == "update"]
    if still := [each for each in updates if each.last.dtype in _HALF and each.mean(_zeros) >= _UNCHANGED]:
        worst = max(still, key=lambda each: each.mean(_zeros))
        others = f" {len(still)} of {len(updates)} parameters keep at least half." if len(still) > 1 else ""
        text = f"of the weights of {worst.name}, in {worst.last.dtype}, are the same after an update as before."
        said.append(f"{_percent(worst.mean(_zeros))} {text}{others}")
    if not said:
        return paragraph("No findings: no overflow, no tensor close to one, and few values that are too small.")
    return element("ul", *(element("li", text) for text in said))


def _exponents(kind: str, title: str, tensors: Sequence[Tensor]) -> Markup:
    share: Callable[[Row], float] = _zeros if kind == "update" else _low
    alarm = _UNCHANGED if kind == "update" else 0.1
    value_name, worst = _RANKS.get(kind, ("small", "the most small values"))
    shown = _foremost(tensors, lambda each: each.headroom if kind == "output" else -each.mean(share))
    narrow = [each.last.range for each in shown if each.last.dtype == "float16"]
    ends = [at for within in narrow for at in (within.subnormal, within.overflow)]
    low, high = _limits([each.exponents for each in shown], ends)
    rows = []
    for each in shown:
        within, total = each.last.range, sum(each.exponents.values())
        rows.append(
            Strip(
                each.name,
                _power_or_none(each.headroom) if kind == "output" else _percent(each.mean(share)),
                {at: count / total for at, count in each.exponents.items()},
                partial(_kind, within),
                [Band(within.subnormal, within.normal, "subnormal"), Band(within.normal, within.overflow, "range")],
                [within.subnormal + shift] if (shift := round(math.log2(each.last.scale))) else [],
                alarming=each.headroom < 1.0 if kind == "output" else each.mean(share) >= alarm,
            )
        )
    scaled = [each.last.scale for each in shown if each.last.scale != 1.0]
    text = "Each row is a tensor, over all steps: the more values have an exponent, the stronger its color."
    if len(shown) < len(tensors):
        text += f" These are the {len(shown)} of {len(tensors)} with {worst}."
    if scaled:
        text += (
            f" Values are shown without the loss scale. The last scale, {power(math.log2(scaled[-1]))}, shifts the "
            "range of the dtype to the left. Without it, all values left of the dashed line would have become 0."
        )
    description = (
        f"{counted(len(shown), 'tensor')}. "
        f"The least headroom is {_power_or_none(min(each.headroom for each in shown))} in "
        f"{min(shown, key=lambda each: each.headroom).name}. The numbers are in the table below."
    )
    picture = strips(title, description, rows, low=low, high=high, value_name=value_name)
    return figure(
        key(*_COLORS), picture, numbers(f"Values of {counted(len(tensors), 'tensor')}", *_table(tensors)), caption=text
    )


def _kind(within: Range, exponent: int) -> str:
    return "low" if exponent < within.normal else "high" if exponent >= within.overflow - 1 else "normal"


def _table(tensors: Sequence[Tensor]) -> tuple[list[str], list[list[str]], str]:
    names = ["tensor", "dtype", "largest", "rms", "headroom", "subnormal", "flushed", "zeros", "inf", "NaN"]
    shares = ("subnormal", "flushed", "zeros", "overflow", "nan")
    body = [
        [
            each.name,
            each.last.dtype,
            f"{max((row.amax for row in each.rows), key=lambda v: math.inf if math.isnan(v) else v):.3g}",
            f"{each.last.rms:.3g}",
            _power_or_none(each.headroom),
            *(_percent(each.mean(attrgetter(share))) for share in shares),
        ]
        for each in tensors
    ]
    caption = "Largest and headroom are the worst of all steps, rms is from the last step, and shares are means."
    return names, body, caption


def _headroom(tensors: Sequence[Tensor]) -> list[Markup]:
    those = [each for each in tensors if each.kind in _NAMES]
    those = [each for each in those if each.last.dtype in _HALF] or those
    worst: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for each in those:
        for row in each.rows:
            at = worst[each.kind, row.dtype]
            at[row.step] = min(at.get(row.step, math.inf), row.headroom)
    finite = [room for at in worst.values() for room in at.values() if math.isfinite(room)]
    if not finite:
        return [paragraph("These tensors have no value that is finite and nonzero.")]
    high = max(8.0, 4.0 * math.ceil(max(finite) / 4.0))
    low = -1.0
    drawn = [
        Line(
            f"{_NAMES[kind]}, {dtype}",
            [(step, -2.0 if room == -math.inf else math.nan if room == math.inf else room) for step, room in at],
        )
        for (kind, dtype), at in ((key, sorted(at.items())) for key, at in worst.items())
    ]
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
        limit=0.0,
    )
    names = ["tensor", "kind", "dtype", "least headroom", "at step", "at last"]
    body = []
    for each in least[:12]:
        row = min(each.rows, key=lambda row: row.headroom)
        rooms = _power_or_none(row.headroom), f"{row.step:,}", _power_or_none(each.last.headroom)
        body.append([each.name, each.kind, each.last.dtype, *rooms])
    text = (
        "The factor by which the largest value could grow before it overflows, for the tensor with the least "
        "headroom at each step. A mark at the lower edge is a step with inf or NaN."
    )
    return [figure(picture, numbers("The tensors with the least headroom", names, body, "Least first."), caption=text)]


# ---- inside


def _low(row: Row) -> float:
    return row.subnormal + row.flushed


def _foremost(items: Sequence[T], rank: Callable[[T], float]) -> list[T]:
    """Choose the items of lowest rank that fit into a picture, in their original order."""
    if len(items) <= _MOST_ROWS:
        return list(items)

    def of(i: int) -> float:
        value = rank(items[i])
        return math.inf if math.isnan(value) else value

    return [items[i] for i in sorted(sorted(range(len(items)), key=of)[:_MOST_ROWS])]


def _limits(histograms: Sequence[dict[int, int]], others: Sequence[int]) -> tuple[int, int]:
    """Choose the limits of a picture that contain nearly all numbers."""
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
