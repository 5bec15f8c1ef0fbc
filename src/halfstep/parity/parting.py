"""Where two recorded runs part, and which rounding one of them does more.

A row is in both runs if a row of the other run has the same numbers, whatever op made them. The runs part at the first
row that is not in both and that an output depends on. From there on ops are aligned by module, op and shape, which
leaves a few ops of each run: these and their dtypes tell the kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from typing import Any, NamedTuple

import torch

from ..numerics.linked_rows import LinkedRow
from ..observe.names import canonical
from .recorded import OUTPUT, Run

__all__ = ["Parting", "is_same", "part"]

_MOST = 600
"""The number of rows after the parting that are aligned."""

_ANCHOR = 3
"""The number of aligned ops in a row that end the place at which runs part."""

_PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm", "convolution", "mkldnn_linear", "dot", "mv", "addmv", "linear"))
_SUMS = frozenset(
    ("sum", "mean", "cumsum", "var", "var_mean", "std", "norm", "linalg_vector_norm", "logsumexp", "prod")
)
_WITH_SUMS = (
    "norm",
    "softmax",
    "attention",
    "lstm",
    "gru",
    "pool",
    "loss",
    "index_add",
    "scatter",
    "rnn",
    "cdist",
    "fft",
)
_EXTRAS = frozenset(("add", "add_", "div", "mul", "div_", "mul_"))
_MOVES = frozenset(
    ("clone", "index", "index_select", "flip", "cat", "stack", "gather", "roll", "constant_pad_nd", "repeat")
)
_CASTS = frozenset(("_to_copy", "copy_", "lift_fresh", "detach"))
_ROOTS = frozenset(("sqrt", "rsqrt", "sqrt_", "rsqrt_", "linalg_vector_norm", "norm"))
_SMALL = 1e-2
"""The largest constant that is taken for an eps."""


class Parting(NamedTuple):
    """Where two runs part.

    Attributes:
        kind: the kind of the difference.
        more: the side, 0 or 1, that rounds more; None if neither does.
        rows: the rows of each side at this place.
        ends: the last of them, or the row that goes in if there is none.
        inputs_differed: True if what goes in differs already.
    """

    kind: str
    more: int | None
    rows: tuple[list[int], list[int]]
    ends: tuple[int, int]
    inputs_differed: bool = False


def _bits(row: LinkedRow) -> tuple[int, int]:
    return row.shape.numel() if isinstance(row.shape, torch.Size) else 0, int(row.sketch[0])


def is_same(a: LinkedRow, b: LinkedRow) -> bool:
    """True if two rows have the same numbers."""
    return _bits(a) == _bits(b)


def _parted(run: Run, other: Run) -> list[int]:
    """List the rows that are not in the other run and that a different output depends on, in order."""
    there = {_bits(other.rows[i]) for i in _reached(other, other.outputs)}
    outputs = zip(run.outputs, other.outputs, strict=True)
    differ = [i for i, j in outputs if not is_same(run.rows[i], other.rows[j])]
    return _reached(run, differ, lambda i: i in run.outputs or _bits(run.rows[i]) not in there)


def _reached(run: Run, ends: Sequence[int], wanted: Callable[[int], bool] = lambda _: True) -> list[int]:
    """List the wanted rows from which the ends were computed, by way of wanted rows, in order."""
    found: set[int] = set()
    left = list(ends)
    while left:
        at = left.pop()
        if at not in found and wanted(at):
            found.add(at)
            left += run.rows[at].inputs
    return sorted(found)


def part(a: Run, b: Run) -> Parting | None:
    """Find where two runs part; None if what they return is equal bit for bit."""
    runs = (a, b)
    parted = (_parted(a, b), _parted(b, a))
    if not all(parted):
        return None
    given = tuple(
        [i for i in found if i not in run.facts and run.rows[i].module != OUTPUT]
        for run, found in zip(runs, parted, strict=True)
    )
    names = [
        {(run.rows[i].module, run.rows[i].op, run.rows[i].shape): i for i in found}
        for run, found in zip(runs, given, strict=True)
    ]
    ops = [[i for i in found if i not in set(not_made)][:_MOST] for found, not_made in zip(parted, given, strict=True)]
    both = [name for name in names[0] if name in names[1]]
    if both:
        pair = names[0][both[0]], names[1][both[0]]
        return Parting("inputs", None, ([pair[0]], [pair[1]]), pair, True)
    keys = [[_key(run.rows[i]) for i in found] for run, found in zip(runs, ops, strict=True)]
    blocks = SequenceMatcher(None, *keys, autojunk=False).get_matching_blocks()
    ends = (len(keys[0]), len(keys[1]))
    anchor = next(b for b in blocks if b.size >= _ANCHOR or not b.size or (b.a + b.size, b.b + b.size) == ends)
    begins = not anchor.a and not anchor.b  # with the same op on both sides
    rows = (ops[0][: anchor.a or begins], ops[1][: anchor.b or begins])
    ahead = [found[:8] for found in ops]
    kind, more = _kind(runs, rows, ahead)
    return Parting(kind, more, rows, _ends(runs, rows, (ops[0], ops[1])))


def _key(row: LinkedRow) -> Any:
    return row.module, row.op, row.index, tuple(row.shape)


def _ends(runs: Sequence[Run], rows: Sequence[list[int]], ops: Sequence[list[int]]) -> tuple[int, int]:
    """Return the row of each side whose values show the difference."""
    found = [of[-1] if of else -1 for of in rows]
    for side in (0, 1):
        if not rows[side]:  # the other side begins with what goes in here
            there = runs[1 - side]
            bits = {_bits(there.rows[i]) for i in there.rows[rows[1 - side][0]].inputs}
            same = [i for i, row in enumerate(runs[side].rows) if _bits(row) in bits]
            found[side] = same[-1] if same else ops[side][0]
    if runs[0].rows[found[0]].shape != runs[1].rows[found[1]].shape:
        found = [runs[0].outputs[0], runs[1].outputs[0]]
    return found[0], found[1]


# ---- kinds


def _computing(run: Run, rows: Sequence[int]) -> list[int]:
    return [i for i in rows if run.rows[i].op not in _CASTS and run.rows[i].op not in _MOVES]


def _kind(runs: Sequence[Run], rows: Sequence[list[int]], ahead: Sequence[list[int]]) -> tuple[str, int | None]:
    computing = [_computing(run, of) for run, of in zip(runs, rows, strict=True)]
    names = [[run.rows[i].op.rstrip("_") for i in of] for run, of in zip(runs, computing, strict=True)]
    if _eps_moved(runs, ahead):
        return "eps", None
    if names[0] == names[1]:
        return _kind_of_equal(runs, rows, computing)
    sums = [sum(name in _PRODUCTS or name in _SUMS for name in of) for of in names]
    if all(sums) and sums[0] != sums[1] and all(name in _PRODUCTS | _SUMS | _EXTRAS for of in names for name in of):
        more = int(sums[1] > sums[0])
        narrow = [runs[more].rows[i].dtype.itemsize < 4 for i in computing[more]]
        return ("accumulation", more) if any(narrow) else ("order", None)
    return "fused", int(len(names[1]) > len(names[0]))


def _kind_of_equal(
    runs: Sequence[Run], rows: Sequence[list[int]], computing: Sequence[list[int]]
) -> tuple[str, int | None]:
    """Tell the kind of ops that have equal names."""
    for i, j in zip(*computing, strict=True):
        a, b = runs[0].rows[i], runs[1].rows[j]
        if a.dtype is not b.dtype:
            wide = int(b.dtype.itemsize > a.dtype.itemsize)
            run, at = runs[wide], (i, j)[wide]
            back = [row for row in run.rows[at + 1 :] if row.op == "_to_copy" and row.inputs == (at,)]
            sums = a.op in _PRODUCTS or a.op in _SUMS
            narrow = (a, b)[1 - wide].dtype
            return ("accumulation" if sums and back and back[0].dtype is narrow else "cast"), 1 - wide
        if runs[0].facts[i].constants != runs[1].facts[j].constants:
            pairs = zip(runs[0].facts[i].constants, runs[1].facts[j].constants, strict=False)
            other = [pair for pair in pairs if pair[0] != pair[1]]
            small = all(isinstance(x, float) and 0 <= x <= _SMALL for pair in other for x in pair)
            return ("eps" if other and small else "arguments"), None
    lossy = [sum(_is_lossy(run, i) for i in of) for run, of in zip(runs, rows, strict=True)]
    if lossy[0] != lossy[1]:
        return "rounding", int(lossy[1] > lossy[0])
    ops = [runs[0].rows[i].op for i in computing[0]]
    sums = any(op in _PRODUCTS or op in _SUMS or any(part in canonical(op) for part in _WITH_SUMS) for op in ops)
    return ("order" if sums else "kernel"), None


def _is_lossy(run: Run, i: int) -> bool:
    row = run.rows[i]
    return row.op in _CASTS and not any(is_same(row, run.rows[j]) for j in row.inputs)


def _eps_moved(runs: Sequence[Run], ahead: Sequence[list[int]]) -> bool:
    """True if one side adds a small constant before a root and the other side behind it."""
    found = []
    for run, rows in zip(runs, ahead, strict=True):
        order = ["root" if run.rows[i].op in _ROOTS else "eps" if _adds_eps(run, i) else "" for i in rows]
        found.append([what for what in order if what][:2])
    return sorted(map(tuple, found)) == [("eps", "root"), ("root", "eps")]


def _adds_eps(run: Run, i: int) -> bool:
    ops = ("add", "add_", "clamp_min", "clamp", "maximum", "clamp_min_")
    return run.rows[i].op in ops and any(isinstance(x, float) and 0 < x <= _SMALL for x in run.facts[i].constants)
