"""The rows of a sampled step, with the gradient statistics that fused steps read in every step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from ...core.dtypes import dtype_name
from ...core.scalars import scalar_dtype
from ...kernels.shards import local
from ...kernels.tensor_table import Number
from ...optimizers.param_rows import ParamRows
from ..observe.names import OUTSIDE, ROOT
from ..observe.reading import Reading
from ..observe.row import Row, merge_rows
from .survey import Sampled, TensorId, TensorSampler

__all__ = ["GradientTotals", "StepRows"]


class GradientTotals:
    """An ``OnGradients`` callback that accumulates gradient statistics over steps, on their device.

    Per parameter: squares, zeros, steps with inf or NaN, steps, and the largest magnitude. Steps with inf or NaN in a
    gradient count as ``overflow`` and do not contribute to its magnitudes.
    """

    def __init__(self) -> None:
        self._totals: dict[tuple[int, ...], tuple[list[torch.Tensor], torch.Tensor]] = {}
        """Totals by the ids of parameters that step together."""
        self._fetched: list[tuple[list[TensorId], Reading]] = []

    def __bool__(self) -> bool:
        return bool(self._totals)

    @torch.no_grad()
    def __call__(self, all_rows: Sequence[ParamRows], inverse: Number) -> None:
        """Add a step.

        Args:
            all_rows: the rows with the gradients of the step.
            inverse: the factor that unscales the gradients.
        """
        for rows in all_rows:
            key = tuple(map(id, rows.params))
            if key not in self._totals:
                new = torch.zeros(5, len(rows.params), dtype=scalar_dtype(rows.device), device=rows.device)
                self._totals[key] = rows.params, new
            squares, zeros, largest = rows.survey()
            if isinstance(inverse, torch.Tensor):
                inverse = inverse.to(rows.device, non_blocking=True)
            squares, largest = squares * (inverse * inverse), largest * inverse
            finite = squares.isfinite() & largest.isfinite()
            total = self._totals[key][1]
            total[:4] += torch.stack([squares.where(finite, 0.0), zeros, ~finite, torch.ones_like(zeros)])
            torch.maximum(total[4], largest.where(finite, 0.0), out=total[4])

    def finish(self, step: int, names: Mapping[int, str]) -> GradientTotals:
        """Send the totals to the host; add no more steps afterwards.

        Args:
            step: the step of the resulting rows.
            names: the names of parameters by ``id``. Parameters without a name are left out.
        """
        for params, total in self._totals.values():
            found = ((names.get(id(param), ""), param) for param in params)
            abouts = [TensorId(step, name, "grad", 0, dtype_name(p.dtype), local(p).numel()) for name, p in found]
            self._fetched.append((abouts, Reading(total).send()))
        self._totals = {}
        return self

    @property
    def ready(self) -> bool:
        """True if ``into`` does not have to wait."""
        return all(fetched.ready for _, fetched in self._fetched)

    def into(self, rows: Sequence[Row]) -> list[Row]:
        """Merge the totals into the rows of a step: gradient rows get magnitudes, zeros and overflows of all steps.

        A parameter that had a gradient only in other steps gets a row without the sampled statistics.
        """
        sums: dict[str, list[float]] = {}
        missing: dict[str, TensorId] = {}
        for abouts, fetched in self._fetched:
            for about, (*line, largest) in zip(abouts, fetched.get()[0].T.tolist(), strict=True):
                if about.module and about.numel:  # a parameter, or a rank's shard, may be empty
                    known = sums.setdefault(about.module, [0.0] * 5)
                    sums[about.module] = [*(a + b for a, b in zip(known, line, strict=False)), max(known[4], largest)]
                    missing[about.module] = about
        made = []
        for row in rows:
            is_known = row.tensor == "grad" and missing.pop(row.module, None) is not None
            made.append(_with(row, *sums[row.module]) if is_known else row)
        return [*made, *(_with(Row(*about), *sums[name]) for name, about in missing.items())]


def _with(row: Row, squares: float, zeros: float, bad: float, steps: float, largest: float) -> Row:
    good = max(steps - bad, 1.0)
    return replace(
        row,
        amax=largest if bad < steps else row.amax,
        rms=math.sqrt(squares / (good * row.numel)),
        zeros=zeros / (steps * row.numel),
        overflow=bad / steps,
        probe=row.probe if steps == 1 else (),
        merged=int(steps),
    )


class StepRows(NamedTuple):
    """The statistics of a sampled step. Rows take more memory, so they are made only on demand.

    Attributes:
        survey: the sampled tensors.
        totals: the finished totals of the gradients since the last sampled step, including this step.
    """

    survey: TensorSampler
    totals: GradientTotals

    @property
    def ready(self) -> bool:
        """True if rows can be made without waiting."""
        return self.totals.ready and self.survey.ready

    def rows(self, *, bins: bool = False, brief: bool = False) -> list[Row]:
        """Make the rows, in order of execution; see ``TensorSampler.rows`` for the arguments."""
        seen = self.survey.rows(bins=bins, brief=brief)
        bad = {looked.number for looked, row in seen if not row.is_finite}
        if bad:
            bad |= self.survey.bad_inputs()
            seen = [(each, row if row.is_finite else replace(row, began_in=_origin(each, bad))) for each, row in seen]
        return self.totals.into(merge_rows(row for _, row in seen))


def _origin(looked: Sampled, bad: set[int]) -> str:
    """Name the innermost running module that got only finite inputs."""
    names = (name for name, inputs in looked.callers if bad.isdisjoint(inputs))
    is_whole = bool(looked.callers) and looked.callers[-1][0] == ROOT
    return next(names, OUTSIDE if is_whole else "")
