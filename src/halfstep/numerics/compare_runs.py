"""``compare``: two saved runs of the same training, row by row, and where they part."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..core.errors import ArgumentValueError
from ..observe.names import OUTSIDE, ROOT, owner_of
from ..observe.row import Row, load_rows
from .comparison import Comparison, Entry
from .errors import Error, entry_of, error_of

__all__ = ["compare"]

Run = str | Path | Iterable[Row]

_FEEDS = ("output", "output_grad")
_GRADIENTS = ("output_grad", "grad")


def compare(run_a: Run, run_b: Run) -> Comparison:
    """Compare two runs that ``Monitor`` has watched, in this process or another, and say where the second one parts.

    ::

        halfstep.numerics.compare("fp32.jsonl", "bf16.jsonl").modules()[0]

    Both should begin with the same weights and see the same batches in the same order. Rows are aligned by step,
    module, tensor and call. Their errors are those of the values that they keep, the same places in both; where shapes
    differ, or rows were added up, only magnitudes are compared.

    Rows do not say which outputs a module got. So an output inherits the largest error of all outputs before it, in the
    order of execution, and the gradient of an output also that of the gradients before it. Gradients of parameters,
    weights and updates inherit these and hand on nothing. What the gradient of an output adds is blamed on the module
    whose own came before it, for its backward pass has made it. So what is found is the first module with an error of
    some size, and a later one only if its error is larger; a smaller one is seen when the first is gone.

    Where the first output with inf or NaN is so in both runs, precision is not the cause: ``not_finite`` says where.

    Args:
        run_a: the reference: a file that ``Monitor.save`` or ``halfstep run --numerics`` wrote, or rows.
        run_b: the candidate.

    Raises:
        ArgumentValueError: for a file of something else, or runs that have no row in common.
    """
    rows_a, rows_b = _rows(run_a), _rows(run_b)
    reference = {_key(row): row for row in rows_a}
    found = [(reference[_key(row)], row) for row in rows_b if _key(row) in reference]
    if not found:
        raise ArgumentValueError(
            f"The runs have no row in common: {_extent(rows_a)} against {_extent(rows_b)}. Watch the same steps "
            "(every=) of models whose modules have the same names."
        )
    alone = len(rows_a) + len(rows_b) - 2 * len(found)
    names = (_name(run_a, "reference"), _name(run_b, "candidate"))
    about = {"rows of one run only": alone} if alone else {}
    return Comparison(_entries(found), names, about, _not_finite(found))


def _not_finite(pairs: Sequence[tuple[Row, Row]]) -> str:
    """Where the reference became inf or NaN, if that is the first such output of the candidate, too."""
    for right, row in pairs:
        if row.tensor == "output" and not row.is_finite:
            what = "NaN" if math.isnan(right.amax) else "inf"
            return "" if right.is_finite else f"{what}, from {right.began_in or right.module}: output"
    return ""


def _rows(run: Run) -> list[Row]:
    return load_rows(run) if isinstance(run, (str, Path)) else list(run)


def _name(run: Run, otherwise: str) -> str:
    return Path(run).name if isinstance(run, (str, Path)) else otherwise


def _key(row: Row) -> tuple[int, str, str, int]:
    return row.step, row.module, row.tensor, row.call


def _extent(rows: Sequence[Row]) -> str:
    if not rows:
        return "no rows"
    steps = sorted({row.step for row in rows})
    return f"steps {steps[0]} to {steps[-1]} of {len({row.module for row in rows})} modules and parameters"


def _entries(pairs: Sequence[tuple[Row, Row]]) -> list[Entry]:
    sizes = _largest_rms(right for right, _ in pairs)
    handed_on, before = Error(), (-1, "")
    entries = []
    for right, row in pairs:
        module, _, name = row.module.rpartition(".")
        module, what = module or ROOT, f"{row.tensor} of {name}"
        norm = 0.0 if row.tensor in _FEEDS else sizes[row.step, module, row.tensor]
        if row.tensor == "output":
            module, what = row.module, row.tensor
        elif row.tensor == "output_grad":  # the backward pass of the module before has made it
            module, what = before[1] if before[0] == row.step else OUTSIDE, f"output_grad of {row.module}"
            before = row.step, row.module
        found = _error(row, right, norm)
        entries.append(
            entry_of(
                found,
                handed_on,
                torch.finfo(getattr(torch, row.dtype)).eps / 2,
                op=what,
                module=module,
                occurrence=row.call,
                backward=row.tensor in _GRADIENTS,
                dtype=row.dtype,
                step=row.step,
            )
        )
        if row.tensor in _FEEDS:
            handed_on = Error.largest((handed_on, found))
    return entries


def _largest_rms(rows: Iterable[Row]) -> dict[Any, float]:
    """The largest root mean square among the parameters of a module, by step, module and tensor.

    One parameter alone is no measure: the gradient of a bias before a norm is nothing but noise.
    """
    found: dict[Any, float] = defaultdict(float)
    for row in rows:
        if row.tensor not in _FEEDS and math.isfinite(row.rms):
            key = row.step, owner_of(row.module), row.tensor
            found[key] = max(found[key], row.rms)
    return found


def _error(row: Row, right: Row, norm: float) -> Error:
    """The error of the values that rows keep, or where these differ in their places, of magnitudes."""
    gradient = row.tensor in _GRADIENTS
    columns = [(row.probe, right.probe)]
    if row.numel != right.numel or len(row.probe) != len(right.probe) or not row.probe:
        columns, gradient = [((row.rms,), (right.rms,)), ((row.amax,), (right.amax,))], False
    found = Error.largest(
        error_of(_tensor(a), _tensor(b), row.amax, right.amax, norm=norm, gradient=gradient) for a, b in columns
    )
    lost = _lost(row, right)
    return found._replace(lost=lost, whole=max(found.whole, lost))


def _tensor(values: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _lost(row: Row, right: Row) -> float:
    """In gradients, the share of numbers that became 0, which is known of more of them than rows keep."""
    if row.tensor not in _GRADIENTS or right.zeros == 1.0 or row.numel != right.numel:
        return 0.0
    return max(0.0, row.zeros - right.zeros) / (1.0 - right.zeros)
