"""``compare``: compares two saved runs of the same training row by row."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from ...core.errors import ArgumentValueError
from ..observe.names import OUTSIDE, owner_of
from ..observe.row import Row, load_rows
from .blame import entries_of
from .comparison import Comparison
from .linked_rows import LinkedRow

__all__ = ["compare"]

Run = str | Path | Iterable[Row]

_GRADIENTS = ("output_grad", "grad")
_NO_SKETCH = torch.empty(0, dtype=torch.float32, device="cpu")


def compare(run_a: Run, run_b: Run) -> Comparison:
    """Compare two runs that ``Monitor`` recorded, in this process or another, and find where the second one diverges.

    ::

        halfstep.numerics.compare("fp32.jsonl", "bf16.jsonl").modules()[0]

    Both runs should begin with the same weights and see the same batches in the same order. Rows are aligned by step,
    module, tensor and call. Errors compare the values that rows keep, at the same positions in both; if shapes differ,
    or rows were merged, only magnitudes are compared.

    Rows do not tell which outputs a module received. So an output inherits the largest error of all outputs before it
    in order of execution, and the gradient of an output also inherits from the gradients before it. Gradients of
    parameters, weights and updates inherit as well and pass nothing on. The error that the gradient of an output adds
    is blamed on the module whose output gradient came before, because its backward pass computed it. So the comparison
    finds the first module with a significant error, and a later module only if its error is larger; smaller errors show
    once the first is fixed.

    If the first output with inf or NaN is the same in both runs, precision is not the cause, and ``not_finite`` names
    it.

    Args:
        run_a: the reference: a file that ``Monitor.save`` or ``halfstep run --numerics`` wrote, or rows.
        run_b: the candidate.

    Raises:
        ArgumentValueError: for another kind of file, or runs that have no row in common.
    """
    rows_a, rows_b = _rows(run_a), _rows(run_b)
    entries, alone = entries_of(_linked(rows_b), _linked(rows_a))
    if not entries:
        raise ArgumentValueError(
            f"The runs have no row in common: {_extent(rows_a)} against {_extent(rows_b)}. Watch the same steps "
            "(every=) of models whose modules have the same names."
        )
    names = (_name(run_a, "reference"), _name(run_b, "candidate"))
    return Comparison(entries, names, {"rows of one run only": alone} if alone else {}, _not_finite(rows_a, rows_b))


def _not_finite(reference: Iterable[Row], candidate: Iterable[Row]) -> str:
    """Name the place where the reference became inf or NaN, if it is the candidate's first such output too."""
    outputs = {(row.step, row.module, row.call): row for row in reference if row.tensor == "output"}
    for row in candidate:
        right = outputs.get((row.step, row.module, row.call))
        if row.tensor == "output" and not row.is_finite and right is not None:
            what = "NaN" if math.isnan(right.amax) else "inf"
            return "" if right.is_finite else f"{what}, from {right.began_in or right.module}: output"
    return ""


def _rows(run: Run) -> list[Row]:
    return load_rows(run) if isinstance(run, (str, Path)) else list(run)


def _name(run: Run, otherwise: str) -> str:
    return Path(run).name if isinstance(run, (str, Path)) else otherwise


def _extent(rows: Sequence[Row]) -> str:
    if not rows:
        return "no rows"
    steps = sorted({row.step for row in rows})
    return f"steps {steps[0]} to {steps[-1]} of {len({row.module for row in rows})} modules and parameters"


def _linked(rows: Iterable[Row]) -> list[LinkedRow]:
    """Link rows: each inherits from the output, or gradient of an output, before it."""
    inputs: tuple[int, ...] = ()
    made_by, step = OUTSIDE, -1
    found = []
    for i, row in enumerate(rows):
        owner, what, feeds = owner_of(row.module), f"{row.tensor} of {row.module.rpartition('.')[2]}", False
        if row.tensor == "output":
            owner, what, feeds = row.module, row.tensor, True
        elif row.tensor == "output_grad":  # computed by the backward pass of the previous module
            owner, what, feeds = made_by if step == row.step else OUTSIDE, f"output_grad of {row.module}", True
            made_by, step = row.module, row.step
        place = owner, what, row.call, row.tensor in _GRADIENTS
        dtype, shape = getattr(torch, row.dtype), torch.Size((row.numel,))
        values = torch.tensor(row.probe, dtype=torch.float64, device="cpu"), row.amax, _NO_SKETCH
        found.append(LinkedRow(*place, dtype, shape, *values, inputs, leaf=not feeds, saved=row))
        inputs = (i,) if feeds else inputs
    return found
