"""The place where two recorded runs part, and which rounding one of them does more.

A row is in both runs if a row of the other run has the same numbers, even from another op. The runs part at the first
row that is not in both and that an output depends on. From there on ops are aligned by module, op and shape, which
leaves a few ops of each run: these and their dtypes tell the kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import NamedTuple

from ..core.oplists.tables import words
from ..diagnostics.numerics.linked_rows import LinkedRow
from ..diagnostics.observe.names import canonical
from .recorded import SideRun

__all__ = ["PRODUCTS", "Parting", "is_same", "part"]

_SMALL = 1e-2
"""The largest constant that is taken for an eps."""

PRODUCTS = words("addmm addmv baddbmm bmm convolution dot linear mkldnn_linear mm mv")
"""Ops that are products of matrices."""

_SUMS = words("cumsum linalg_vector_norm logsumexp mean norm prod std sum var var_mean")
_WITH_SUMS = words("norm softmax attention lstm gru rnn pool loss index_add scatter cdist fft")
_EXTRAS = words("add div mul")
_MOVES = words("cat clone constant_pad_nd flip gather index index_select repeat roll stack")
_CASTS = words("_to_copy copy_ detach lift_fresh")
_ROOTS = words("linalg_vector_norm norm rsqrt sqrt")
_ADDS = words("add clamp clamp_min maximum")


class Parting(NamedTuple):
    """The place where two runs part.

    Attributes:
        kind: the kind of the difference.
        more: the side, 0 or 1, that rounds more; None if neither does.
        rows: the rows of each side at this place.
        ends: the last of them, or the row that goes in if there is none.
    """

    kind: str
    more: int | None
    rows: tuple[list[int], list[int]]
    ends: tuple[int, int]


def _bits(row: LinkedRow) -> tuple[int, int]:
    return row.shape.numel(), int(row.sketch[0])


def is_same(a: LinkedRow, b: LinkedRow) -> bool:
    """True if two rows have the same numbers."""
    return _bits(a) == _bits(b)


class _Side:
    """The rows of one run from the parting on.

    Attributes:
        outputs: the rows of outputs that differ.
        ops: the rows that the other run lacks, in order: results of ops, and outputs.
        given: the other such rows, weights and inputs, by module, name and shape.
        at: the rows of ``ops`` at the parting.
        roundings: the number of casts among them that change numbers.
        computing: the rows among them that neither cast nor move numbers.
        names: their names.
        sums: the number of products and sums among them.
    """

    def __init__(self, run: SideRun, other: SideRun) -> None:
        there = {_bits(other.rows[i]) for i in _reached(other, other.outputs)}
        pairs = zip(run.outputs, other.outputs, strict=True)
        self.outputs = [i for i, j in pairs if not is_same(run.rows[i], other.rows[j])]
        found = _reached(run, self.outputs, lambda i: i in run.outputs or _bits(run.rows[i]) not in there)
        self.rows, self.facts = run.rows, run.facts
        made = {*run.facts, *run.outputs}
        # To align more rows takes long, and their differences only follow from these.
        self.ops = [i for i in found if i in made][:600]
        self.given = {(run.rows[i].module, run.rows[i].op, run.rows[i].shape): i for i in found if i not in made}
        self.keys = [(row.module, row.op, row.index, tuple(row.shape)) for row in map(run.rows.__getitem__, self.ops)]

    def part_at(self, count: int) -> bool:
        """Put the first ops at the parting; return True if one of them computes or rounds."""
        self.at = self.ops[:count]
        casts = [self.rows[i] for i in self.at if self.rows[i].op in _CASTS]
        self.roundings = sum(not any(is_same(row, self.rows[j]) for j in row.inputs) for row in casts)
        self.computing = [i for i in self.at if self.rows[i].op not in _CASTS | _MOVES]
        self.names = [self.rows[i].op.rstrip("_") for i in self.computing]
        self.sums = sum(name in PRODUCTS | _SUMS for name in self.names)
        return bool(self.computing or self.roundings)

    @property
    def order_of_eps(self) -> tuple[str, ...]:
        """The order of the next root, and of the next small constant that is added.

        The ops right before the parting also count: a constant that is lost in rounding, and a root before it that both
        sides have, do not change numbers.
        """
        found = []
        before = {j for i in self.ops[:1] for j in self.rows[i].inputs}
        # An eps is near the parting.
        for i in [*sorted(before.union(*(self.rows[j].inputs for j in before))), *self.ops[:8]]:
            small = i in self.facts and any(isinstance(x, float) and 0 < x <= _SMALL for x in self.facts[i][1])
            name = self.rows[i].op.rstrip("_")
            found += ["root"] if name in _ROOTS else ["eps"] if small and name in _ADDS else []
        return tuple(found[:2])

    def end(self, other: _Side) -> int:
        """Return the row that shows the difference: the last one, or without any what the other side begins with."""
        if self.at:
            return self.at[-1]
        begins = {_bits(other.rows[i]) for i in other.rows[other.at[0]].inputs}
        return next((i for i, row in reversed(list(enumerate(self.rows))) if _bits(row) in begins), self.ops[0])


def _reached(run: SideRun, ends: Sequence[int], wanted: Callable[[int], bool] = lambda _: True) -> list[int]:
    """List the wanted rows from which the ends were computed, by way of wanted rows, in order."""
    found: set[int] = set()
    left = list(ends)
    while left:
        at = left.pop()
        if at not in found and wanted(at):
            found.add(at)
            left += run.rows[at].inputs
    return sorted(found)


def part(run: SideRun, other: SideRun) -> Parting | None:
    """Find where two runs part; None if what they return is equal bit for bit."""
    a, b = _Side(run, other), _Side(other, run)
    if not a.ops or not b.ops:
        return None
    if pair := next(((i, b.given[place]) for place, i in a.given.items() if place in b.given), None):
        return Parting("inputs", None, ([pair[0]], [pair[1]]), pair)
    blocks = SequenceMatcher(None, a.keys, b.keys, autojunk=False).get_matching_blocks()
    ends = (len(a.keys), len(b.keys))
    # Three aligned ops in a row end the place at which the runs part.
    anchor = next(x for x in blocks if x.size >= 3 or not x.size or (x.a + x.size, x.b + x.size) == ends)
    if not a.part_at(anchor.a) | b.part_at(anchor.b):  # the op after them is the first that shows the difference
        a.part_at(anchor.a + 1)
        b.part_at(anchor.b + 1)
    last = a.end(b), b.end(a)
    last = last if a.rows[last[0]].shape == b.rows[last[1]].shape else (a.outputs[0], b.outputs[0])
    return Parting(*_kind(a, b), (a.at, b.at), last)


def _kind(a: _Side, b: _Side) -> tuple[str, int | None]:
    """Tell the kind of a difference, and which side rounds more."""
    if sorted((a.order_of_eps, b.order_of_eps)) == [("eps", "root"), ("root", "eps")]:
        return "eps", None
    if a.names == b.names:
        return _kind_of_equal(a, b)
    if a.sums and b.sums and a.sums != b.sums and {*a.names, *b.names} <= PRODUCTS | _SUMS | _EXTRAS:
        more = int(b.sums > a.sums)
        narrow = any((a, b)[more].rows[i].dtype.itemsize < 4 for i in (a, b)[more].computing)
        return ("accumulation", more) if narrow else ("order", None)
    return "fused", int(len(b.names) > len(a.names))


def _kind_of_equal(a: _Side, b: _Side) -> tuple[str, int | None]:
    """Tell the kind of a difference between ops of equal names."""
    for i, j in zip(a.computing, b.computing, strict=True):
        dtypes = a.rows[i].dtype, b.rows[j].dtype
        if dtypes[0] is not dtypes[1]:
            wide = int(dtypes[1].itemsize > dtypes[0].itemsize)
            of, at = ((a, i), (b, j))[wide]
            back = [row.dtype for row in of.rows[at + 1 :] if row.op == "_to_copy" and row.inputs == (at,)]
            return ("accumulation" if of.sums and back[:1] == [dtypes[1 - wide]] else "cast"), 1 - wide
        constants = zip_longest(a.facts[i][1], b.facts[j][1]) if i in a.facts else ()
        if other := [x for pair in constants if pair[0] != pair[1] for x in pair]:
            return ("eps" if all(isinstance(x, float) and 0 <= x <= _SMALL for x in other) else "arguments"), None
    if a.roundings != b.roundings:
        return "rounding", int(b.roundings > a.roundings)
    sums = any(part in canonical(name) for name in a.names for part in _WITH_SUMS)
    return ("order" if a.sums or sums else "kernel"), None
