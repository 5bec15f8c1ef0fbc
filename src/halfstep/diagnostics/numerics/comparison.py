"""``Comparison``: the divergence of two runs, sorted by the error that a module adds and does not inherit; its page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...core.text import counted
from ..pages import (
    Bar,
    Line,
    Markup,
    Shown,
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
from .text import aligned

__all__ = ["LIMIT", "Comparison", "Entry"]

LIMIT = 32.0
"""An excess above this is a divergence: well-conditioned ops have one or two, a softmax or a norm perhaps ten."""

_COLUMNS = ["module", "excess", "added", "inherited", "error", "at", "dtype", "why"]
_SHOWN = 12
_MOST_BARS = 32
_MOST_ROWS = 500
_MOST_MARKS = 100
_LEAST_ERROR = -30.0  # as a power of 2; smaller errors are drawn there


@dataclass(frozen=True)
class Entry:
    """One tensor in both runs.

    Attributes:
        module: the qualified name of the module; "(root)" is the model, "(step)" is code outside modules.
        op: the op that returned the tensor; in a comparison of saved runs the role of the tensor, such as "output".
        occurrence: the index among equal ops of the module, from 0.
        backward: True if the tensor belongs to the backward pass.
        dtype: the dtype in the candidate.
        error: the relative error of a sample of values, as an L2 norm: 0.01 is one percent. inf if the candidate is
            not finite and the reference is.
        inherited: the largest error of the inputs.
        added: the amount by which ``error`` exceeds ``inherited``.
        excess: ``added`` in units of the expected error: the unit roundoff of the dtype in which the op should compute,
            and the inherited error.
        why: the visible cause: "overflow", "underflow", "cancellation", "fp32 op in 16 bits", "fp32 in name only", or
            "".
        step: the step of saved runs.
    """

    module: str
    op: str
    occurrence: int
    backward: bool
    dtype: str
    error: float
    inherited: float
    added: float
    excess: float
    why: str = ""
    step: int = 0

    @property
    def diverges(self) -> bool:
        """True if the added error exceeds the roundoff and conditioning of ordinary ops."""
        return self.excess > LIMIT

    def __str__(self) -> str:
        where = f"{self.module}: {_at(self)}"
        cause = f", {self.why}" if self.why else ""
        return f"{where} in {self.dtype}{cause}: error {self.error:.2g}, of which inherited {self.inherited:.2g}"


@dataclass(frozen=True)
class Comparison(Shown):
    """The differences between two runs of the same step or steps. Print it, or call its methods.

    Attributes:
        entries: the tensors that both runs have, in order of execution.
        names: the names of the two runs, the reference first.
        about: other facts by name: the number of unmatched ops, the loss scale, and so on.
        not_finite: the place where the reference itself became inf or NaN, such as "NaN, from 1.norm: rsqrt"; else
            empty.
    """

    entries: list[Entry]
    names: tuple[str, str] = ("reference", "candidate")
    about: Mapping[str, Any] = field(default_factory=dict)
    not_finite: str = ""

    def modules(self) -> list[Entry]:
        """Return the worst entry of each module by decreasing excess; equal ones stay in order of execution."""
        worst: dict[str, Entry] = {}
        for entry in sorted(self.entries, key=lambda entry: -entry.excess):
            worst.setdefault(entry.module, entry)
        return list(worst.values())

    def first(self) -> Entry | None:
        """Return the first entry, in order of execution, at which the candidate diverges; None if none does."""
        return next((entry for entry in self.entries if entry.diverges), None)

    def report(self, path: str | Path, *, command: str | None = None) -> None:
        """Write one self-contained HTML page with pictures and their tables.

        Args:
            path: the file; missing folders are created.
            command: the command that made the comparison, shown on the page.
        """
        entries, modules, first = self.entries, self.modules(), self.first()
        reference, candidate = self.names
        facts = [f"{counted(len(entries), 'tensor')} in {counted(len(modules), 'module')}."]
        facts += [f"{name}: {value}." for name, value in self.about.items()]
        runs = join([element("code", candidate), " against ", element("code", reference)])
        top = header("halfstep numerics", "Where two runs part", runs, made_by(command), " ".join(facts))
        said = [f"{_said_of_reference(reference, self.not_finite)}."] if self.not_finite else []
        said += [] if first is None else [f"First divergence: {first}."]
        parts = [top, note(" ".join(said) or "No module adds more error than roundoff explains.")]
        if entries:
            parts.append(section("What each module adds", _modules(modules)))
            parts.append(section("Errors in the order of execution", _errors(entries)))
        write_page(path, f"{candidate} against {reference}", parts)

    def __str__(self) -> str:
        first, found = self.first(), self.modules()
        reference, candidate = self.names
        sizes = f"{counted(len(self.entries), 'tensor')} in {counted(len(found), 'module')}"
        text = [f"{candidate} against {reference}: {sizes}"]
        text += [f"{name}: {value}" for name, value in self.about.items()]
        if self.not_finite:
            text.append(_said_of_reference(reference, self.not_finite))
        if first is not None or not self.not_finite:
            text.append("no divergence" if first is None else f"first divergence: {first}")
        rows = [_COLUMNS, *map(_row, found[:_SHOWN])]
        more = [f"and {counted(len(found) - _SHOWN, 'more module')}"] if len(found) > _SHOWN else []
        return "\n".join([*text, "", *aligned(rows, right=range(1, 5)), *more])


# ---- the page


def _said_of_reference(name: str, not_finite: str) -> str:
    """Write the sentence about a reference that itself is inf or NaN, from ``Comparison.not_finite``."""
    what, _, where = not_finite.partition(", from ")
    return f"{name} is {what} as well: precision is not the cause. It began at {where}"


def _modules(modules: Sequence[Entry]) -> Markup:
    shown = modules[:_MOST_BARS]
    finite = [module.excess for module in shown if math.isfinite(module.excess)]
    longest = max(_length(max([*finite, LIMIT])), _length(LIMIT) * 1.6)
    rows = [
        Bar(module.module, _share(module.added), _length(module.excess) / longest, module.excess > LIMIT)
        for module in shown
    ]
    diverge = counted(sum(module.excess > LIMIT for module in modules), "diverges", "diverge")
    description = f"{counted(len(modules), 'module')}, of which {diverge}. The first is {modules[0].module}."
    text = (
        "The error that each module adds to its inherited error, in units of the expected roundoff, on a logarithmic "
        f"scale. Bars beyond the line at {LIMIT:g} are divergences. The numbers are the added errors, relative to the "
        "tensors."
    )
    if len(shown) < len(modules):
        text += f" These are the {len(shown)} of {len(modules)} modules that add the most."
    table = numbers("Numbers", _COLUMNS, map(_row, modules[:_MOST_ROWS]), "The module that adds the most is first.")
    picture = bars("What each module adds", description, rows, mark=_length(LIMIT) / longest, value_name="added")
    return figure(picture, table, caption=text)


def _errors(entries: Sequence[Entry]) -> Markup:
    drawn = []
    for backward, name in ((False, "forward pass"), (True, "backward pass")):
        points = [
            (i, _power_of(entry.error)) for i, entry in enumerate(entries) if entry.backward is backward and entry.error
        ]
        if points:
            beyond = [(i, value) for i, value in points if entries[i].diverges and value < math.inf]
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
    text = (
        "The relative error of each tensor, in order of execution; tensors without an error are left out. Crosses are "
        "divergences, triangles are inf or NaN."
    )
    caption = None if len(entries) <= _MOST_ROWS else f"The first {_MOST_ROWS} of {len(entries)} tensors."
    return figure(picture, numbers("All tensors", _COLUMNS, map(_row, entries[:_MOST_ROWS]), caption), caption=text)


def _row(entry: Entry) -> list[str]:
    """Write the cells of an entry, in text and on a page; see ``_COLUMNS``."""
    errors = [f"{n:.2g}" for n in (entry.excess, entry.added, entry.inherited, entry.error)]
    return [entry.module, *errors, _at(entry), entry.dtype, entry.why or "."]


def _at(entry: Entry) -> str:
    """Name the op, with its occurrence if it is not the first, and the pass if it is the backward pass."""
    return entry.op + f" #{entry.occurrence}" * (entry.occurrence > 0) + " (backward)" * entry.backward


def _power_of(error: float) -> float:
    if not math.isfinite(error):
        return math.inf
    return max(math.log2(error), _LEAST_ERROR)


def _length(excess: float) -> float:
    """Compute the length of a bar: the logarithm of 1 + excess."""
    return math.log2(1.0 + excess) if math.isfinite(excess) else math.inf


def _share(error: float) -> str:
    return "inf" if math.isinf(error) else f"{100.0 * error:.2g} %" if error >= 1e-5 else f"{error:.1g}"
