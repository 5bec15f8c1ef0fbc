"""The report of a comparison: which module adds how much error, and where two runs part."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.text import counted
from ..pages import (
    Bar,
    Line,
    Markup,
    bars,
    element,
    figure,
    header,
    join,
    lines,
    made_by,
    note,
    numbers,
    paragraph,
    section,
    write_page,
)

__all__ = ["said_of_reference", "write_comparison"]

_MOST_BARS = 32
_MOST_ROWS = 500
_MOST_MARKS = 100
_LEAST_ERROR = -30.0  # as a power of 2; what is smaller is drawn there


def write_comparison(comparison: Mapping[str, Any], path: str | Path, *, command: str | None = None) -> None:
    """Write one self-contained HTML page with pictures of a comparison, and a table beside each.

    Args:
        comparison: what ``Comparison.to_dict()`` gave.
        path: the file; missing folders are made.
        command: what made the comparison, to be shown.
    """
    reference, candidate = comparison["names"]
    entries, modules = comparison["entries"], comparison["modules"]
    facts = [f"{counted(len(entries), 'tensor')} in {counted(len(modules), 'module')}."]
    facts += [f"{name}: {value}." for name, value in comparison["about"].items()]
    runs = join([element("code", candidate), " against ", element("code", reference)])
    top = header("halfstep numerics", "Where two runs part", runs, made_by(command), " ".join(facts))
    first = next((entry for entry in entries if entry["diverges"]), None)
    said = []
    if comparison.get("not_finite"):
        said.append(f"{said_of_reference(reference, comparison['not_finite'])}.")
    if first is not None:
        said.append(f"First divergence: {_said(first)}")
    parts = [top, note(" ".join(said) or "No module adds more error than roundoff explains.")]
    if entries:
        parts.append(section("What each module adds", _modules(modules, entries, comparison["limit"])))
        parts.append(section("Errors in the order of execution", _errors(entries)))
    write_page(path, f"{candidate} against {reference}", parts)


def said_of_reference(name: str, not_finite: str) -> str:
    """The sentence about a reference that is inf or NaN itself, from ``Comparison.not_finite``."""
    what, _, where = not_finite.partition(", from ")
    return f"{name} is {what} as well: not a matter of precision. It began at {where}"


def _modules(modules: Sequence[Any], entries: Sequence[Any], limit: float) -> Markup:
    shown = modules[:_MOST_BARS]
    finite = [module["excess"] for module in shown if math.isfinite(module["excess"])]
    longest = max(_length(max([*finite, limit])), _length(limit) * 1.6)
    rows = [
        Bar(_name(module), _share(module["added"]), _length(module["excess"]) / longest, module["excess"] > limit)
        for module in shown
    ]
    diverge = counted(sum(module["excess"] > limit for module in modules), "diverges", "diverge")
    description = f"{counted(len(modules), 'module')}, of which {diverge}. The first is {_name(modules[0])}."
    text = (
        "The error that each module adds to what it inherits, in units of what roundoff explains, on a logarithmic "
        f"scale. The line is at {limit:g}: what is beyond it is a divergence. The number is the error added, relative "
        "to the tensor."
    )
    if len(shown) < len(modules):
        text += f" These are the {len(shown)} of {len(modules)} that add most."
    names = ["module", "times roundoff", "added", "inherited", "error", "at", "dtype", "why"]
    body = []
    for module in modules[:_MOST_ROWS]:
        worst = entries[module["worst"]]
        shares = [_share(module[name]) for name in ("added", "inherited", "error")]
        body.append([_name(module), f"{module['excess']:.2g}", *shares, _at(worst), worst["dtype"], worst["why"]])
    picture = bars("What each module adds", description, rows, mark=_length(limit) / longest, value_name="added")
    return figure(picture, numbers("Numbers", names, body, "The module that adds most is first."), caption=text)


def _errors(entries: Sequence[Any]) -> Markup:
    drawn = []
    for backward, name in ((False, "forward pass"), (True, "backward pass")):
        points = [
            (i, _power_of(entry["error"]))
            for i, entry in enumerate(entries)
            if entry["backward"] is backward and entry["error"]
        ]
        if points:
            beyond = [(i, value) for i, value in points if entries[i]["diverges"] and value < math.inf]
            drawn.append(Line(name, points, beyond[:_MOST_MARKS]))
    if not drawn:
        return paragraph("No tensor has an error.")
    known = [value for line in drawn for _, value in line.points if value < math.inf]
    high = max(2.0, math.ceil(max(known, default=0.0)) + 1.0)
    low = min(math.floor(min(known, default=0.0)), -4.0) - 1.0
    picture = lines(
        "Errors in the order of execution",
        f"{counted(len(entries), 'tensor')}; "
        f"the largest finite error is {_share(2.0 ** max(known, default=_LEAST_ERROR))}.",
        drawn,
        low=low,
        high=high,
    )
    names = ["module", "op", "pass", "dtype", "error", "inherited", "added", "times roundoff", "why"]
    body = [
        [
            _name(entry),
            f"{entry['op']} #{entry['occurrence']}" if entry["occurrence"] else entry["op"],
            "backward" if entry["backward"] else "forward",
            entry["dtype"],
            *(_share(entry[name]) for name in ("error", "inherited", "added")),
            f"{entry['excess']:.2g}",
            entry["why"],
        ]
        for entry in entries[:_MOST_ROWS]
    ]
    text = (
        "The relative error of each tensor, one after the other; those without any are left out. Crosses are "
        "divergences, triangles are inf or NaN."
    )
    caption = None if len(entries) <= _MOST_ROWS else f"The first {_MOST_ROWS} of {len(entries)} tensors."
    return figure(picture, numbers("All tensors", names, body, caption), caption=text)


def _said(entry: Any) -> str:
    cause = f", {entry['why']}" if entry["why"] else ""
    errors = f"error {_share(entry['error'])}, of which inherited {_share(entry['inherited'])}"
    return f"{_name(entry)}, {_at(entry)} in {entry['dtype']}{cause}: {errors}."


def _at(entry: Any) -> str:
    return f"{entry['op']} (backward)" if entry["backward"] else str(entry["op"])


def _name(item: Any) -> str:
    return item["module"] or "(model)"


def _power_of(error: float) -> float:
    if not math.isfinite(error):
        return math.inf
    return max(math.log2(error), _LEAST_ERROR)


def _length(excess: float) -> float:
    """How long a bar is: the logarithm, from 1 on."""
    return math.log2(1.0 + excess) if math.isfinite(excess) else math.inf


def _share(error: float) -> str:
    return "inf" if math.isinf(error) else f"{100.0 * error:.2g} %" if error >= 1e-5 else f"{error:.1g}"
