"""``Parity``: where two runs part, as text and as a page."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ..core.text import counted
from ..diagnostics.numerics.text import aligned
from ..diagnostics.pages import Shown, facts, header, made_by, note, section, small, table, write_page

__all__ = ["KINDS", "Difference", "OpDifference", "Parity"]

KINDS = {
    "inputs": "the two sides were given different weights or inputs",
    "rounding": "one side rounds a result to a narrower dtype, which the other side keeps wide",
    "cast": "one side computes in a narrower dtype: a cast is left out, or one is added",
    "accumulation": "the terms of a sum are added up in different dtypes",
    "order": "the same sum in another order: split, permuted, or by another kernel",
    "fused": "one side computes in one op what the other side computes in several, with a rounding after each",
    "eps": "eps has another value, or is added in another place",
    "arguments": "the same op was called with other constants",
    "kernel": "the same op on the same numbers gives other bits: other kernels, threads or strides",
}
"""A description of each kind of difference."""

_COLUMNS = ("module", "op", "ulps", "inputs", "dtypes")
_SHOWN = 12


@dataclass(frozen=True)
class Difference:
    """The first place at which two sides round differently.

    Attributes:
        module: the qualified name of the module; "(root)" is the model, "(step)" is code outside modules, and
            "(output)" means that only the outputs of compiled code show the difference.
        op: the first op whose result differs.
        occurrence: the index among equal ops of the module, from 0.
        kind: a key of ``KINDS``.
        more: the name of the side that rounds more; "" if neither does.
        ulps: the largest difference, in units in the last place of ``dtype``.
        share: the share of values that differ.
        inputs_differed: True if the inputs of the op differed already.
        nearer: the name of the side whose result is nearer to float64; "" if equal or unknown.
        dtype: the narrower dtype of both results.
        a: the ops of the first side at this place, with their dtypes.
        b: the ops of the second side.
        note: a sentence about where this comes from; "" if it was observed op by op.
    """

    module: str
    op: str
    occurrence: int
    kind: str
    more: str
    ulps: float
    share: float
    inputs_differed: bool
    nearer: str
    dtype: str
    a: tuple[str, ...]
    b: tuple[str, ...]
    note: str = ""

    def __str__(self) -> str:
        number = f" #{self.occurrence}" if self.occurrence else ""
        return f"{self.module}: {self.op}{number}, {self.kind}: {KINDS[self.kind]}"


@dataclass(frozen=True)
class OpDifference:
    """An op of both sides.

    Attributes:
        module: the qualified name of the module.
        op: the name of the op.
        dtypes: the dtype of the result on each side.
        ulps: the largest difference of a sample of values, in units in the last place; 0.0 if all bits agree.
        inputs_differed: True if an input differed already.
    """

    module: str
    op: str
    dtypes: tuple[str, str]
    ulps: float
    inputs_differed: bool


@dataclass(frozen=True)
class Parity(Shown):
    """The comparison of two sides. Print it, or call ``report``. True if the outputs agree bit for bit.

    Attributes:
        names: the names of the two sides.
        first: the first difference; None if the outputs agree.
        ops: the ops that both sides have, in order of execution.
        alone: the number of ops of one side only.
    """

    names: tuple[str, str]
    first: Difference | None
    ops: list[OpDifference] = field(default_factory=list)
    alone: int = 0

    def __bool__(self) -> bool:
        return self.first is None

    def __str__(self) -> str:
        lines = [f"{' and '.join(self.names)}: {counted(len(self.ops), 'common op')}, {self.alone} of one side only"]
        if self.first is None:
            return "\n".join([*lines, "equal bit for bit"])
        lines.append(f"first difference: {self.first}")
        lines += [f"  {key}: {text}" for key, text in self._about(self.first).items()]
        rows = [_COLUMNS, *map(_cells, [op for op in self.ops if op.ulps][:_SHOWN])]
        return "\n".join([*lines, "", *aligned(rows, right=(2,))] if rows[1:] else lines)

    def report(self, path: str | Path, *, command: str | None = None) -> None:
        """Write one self-contained HTML page.

        Args:
            path: the file; missing folders are created.
            command: the command that made the comparison, shown on the page.
        """
        a, b = self.names
        parts = [header("halfstep parity", "Where two runs round differently", f"{a} and {b}", made_by(command))]
        parts.append(note(f"First difference: {self.first}." if self.first else "The outputs are equal bit for bit."))
        if self.first is not None:
            parts.append(section("What differs there", facts(self._about(self.first))))
        caption = f"Ops of both sides in order of execution; {self.alone} are of one side only."
        rows = table(_COLUMNS, map(_cells, self.ops[:500]), caption)
        every = section("All ops", rows, small("Ulps are taken from a sample of values."))
        write_page(path, f"{a} and {b}", [*parts, every])

    def _about(self, first: Difference) -> dict[str, str]:
        """Describe the first difference."""
        known = {
            **{name: " ".join(ops) or "(nothing)" for name, ops in zip(self.names, (first.a, first.b), strict=True)},
            "differs by": f"up to {first.ulps:.3g} ulps of {first.dtype}, in {first.share:.1%} of its values",
            "inputs": "differed already" if first.inputs_differed else "equal",
            "rounds more": first.more,
            "nearer to float64": first.nearer,
            "note": first.note,
        }
        return {name: text for name, text in known.items() if text}


def _cells(op: OpDifference) -> list[str]:
    dtypes = op.dtypes[0] if op.dtypes[0] == op.dtypes[1] else " ".join(op.dtypes)
    return [op.module, op.op, f"{op.ulps:.3g}", "differ" if op.inputs_differed else "equal", dtypes]
