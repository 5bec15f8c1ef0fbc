"""``Comparison``: where two runs part, sorted by the error that a module adds and not by what it inherits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..core.text import counted
from .comparison_report import said_of_reference, write_comparison
from .text import aligned

__all__ = ["LIMIT", "Comparison", "Entry", "ModuleError"]

LIMIT = 32.0
"""An excess above this is a divergence: well-conditioned ops have one or two, a softmax or a norm perhaps ten."""

_SHOWN = 12


@dataclass(frozen=True)
class Entry:
    """One tensor in both runs.

    Attributes:
        module: its qualified name; "(root)" is the model, "(step)" what runs outside of modules.
        op: the op that returned it; in a comparison of saved runs what it is to the module, as in "output".
        occurrence: which of those of the module, counted from 0.
        backward: whether it belongs to the backward pass.
        dtype: in the candidate.
        error: the relative error of a sample of values, as an L2 norm: 0.01 is one percent. inf if the candidate is
            not finite and the reference is.
        inherited: the largest error of what went in.
        added: by how much ``error`` is larger than ``inherited``.
        excess: ``added`` in units of what is to be expected: the unit roundoff of the dtype that the op should compute
            in, and the error inherited.
        why: what is seen of the cause: "overflow", "underflow", "cancellation", "fp32 op in 16 bits", "fp32 in name
            only", or nothing.
        step: which step of saved runs.
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
        """Whether more is added than roundoff and the condition of ordinary ops explain."""
        return self.excess > LIMIT

    def __str__(self) -> str:
        where = f"{self.module}: {self.op}{' (backward)' if self.backward else ''}"
        cause = f", {self.why}" if self.why else ""
        return f"{where} in {self.dtype}{cause}: error {self.error:.2g}, of which inherited {self.inherited:.2g}"


@dataclass(frozen=True)
class ModuleError:
    """The error that one module adds.

    Attributes:
        module: its qualified name.
        excess: the largest of its entries.
        error: of that entry.
        inherited: by that entry.
        added: by that entry.
        worst: that entry.
    """

    module: str
    excess: float
    error: float
    inherited: float
    added: float
    worst: Entry


@dataclass(frozen=True)
class Comparison:
    """The differences between two runs of the same step, or of the same steps. Print it, or ask.

    Attributes:
        entries: what both runs have, in order of execution.
        names: what is compared, the reference first.
        about: other facts, by name: how many ops only one run has, the loss scale, and so on.
        not_finite: where the reference became inf or NaN itself, as in "NaN, from 1.norm: rsqrt"; empty if it did not.
    """

    entries: list[Entry]
    names: tuple[str, str] = ("reference", "candidate")
    about: Mapping[str, Any] = field(default_factory=dict)
    not_finite: str = ""

    def modules(self) -> list[ModuleError]:
        """The modules, that which adds most first; of equals, that which did so first."""
        worst: dict[str, Entry] = {}
        for entry in self.entries:
            if entry.module not in worst or entry.excess > worst[entry.module].excess:
                worst[entry.module] = entry
        order = {id(entry): i for i, entry in enumerate(self.entries)}
        found = sorted(worst.values(), key=lambda entry: (-entry.excess, order[id(entry)]))
        return [ModuleError(e.module, e.excess, e.error, e.inherited, e.added, e) for e in found]

    def first(self) -> Entry | None:
        """The first entry, in order of execution, at which the candidate diverges; None if none does."""
        return next((entry for entry in self.entries if entry.diverges), None)

    def to_dict(self) -> dict[str, Any]:
        """All of it in dicts, lists, strings and numbers; numbers may be inf."""
        return {
            "names": list(self.names),
            "about": dict(self.about),
            "not_finite": self.not_finite,
            "limit": LIMIT,
            "entries": [{**asdict(entry), "diverges": entry.diverges} for entry in self.entries],
            "modules": [{**asdict(module), "worst": self.entries.index(module.worst)} for module in self.modules()],
        }

    def report(self, path: str | Path) -> None:
        """Write one self-contained HTML page with pictures, and a table beside each.

        Args:
            path: the file; missing folders are made.
        """
        write_comparison(self.to_dict(), path)

    def __str__(self) -> str:
        first, found = self.first(), self.modules()
        reference, candidate = self.names
        sizes = f"{counted(len(self.entries), 'tensor')} in {counted(len(found), 'module')}"
        lines = [f"{candidate} against {reference}: {sizes}"]
        lines += [f"{name}: {value}" for name, value in self.about.items()]
        if self.not_finite:
            lines.append(said_of_reference(reference, self.not_finite))
        if first is not None or not self.not_finite:
            lines.append("no divergence" if first is None else f"first divergence: {first}")
        rows = [["module", "excess", "added", "inherited", "error", "at", "dtype", "why"]]
        for module in found[:_SHOWN]:
            at = f"{module.worst.op}{' (backward)' if module.worst.backward else ''}"
            numbers = [f"{n:.2g}" for n in (module.excess, module.added, module.inherited, module.error)]
            rows.append([module.module, *numbers, at, module.worst.dtype, module.worst.why or "."])
        more = [f"and {counted(len(found) - _SHOWN, 'more module')}"] if len(found) > _SHOWN else []
        return "\n".join([*lines, "", *aligned(rows, right=range(1, 5)), *more])
