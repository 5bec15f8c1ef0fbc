"""Statistics of the gradients of every step, from the read that a fused step makes anyway."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ..core.scalars import scalar_dtype
from ..kernels.shards import local
from ..kernels.tensor_table import Number
from ..observe.fetched import Fetched
from ..observe.row import Row
from ..optimizers.param_rows import ParamRows

__all__ = ["GradientTotals"]


class _Total:
    """The steps of some parameters: five lines, added up where the gradients are."""

    def __init__(self, rows: ParamRows) -> None:
        self.params = rows.params
        self.sums = torch.zeros(4, len(rows.params), dtype=scalar_dtype(rows.device), device=rows.device)
        self.largest = torch.zeros(len(rows.params), dtype=scalar_dtype(rows.device), device=rows.device)

    def add(self, survey: torch.Tensor, inverse: Number) -> None:
        squares, zeros, largest = survey
        if isinstance(inverse, torch.Tensor):
            inverse = inverse.to(survey.device, non_blocking=True)
        squares, largest = squares * (inverse * inverse), largest * inverse
        finite = squares.isfinite() & largest.isfinite()
        self.sums += torch.stack([squares.where(finite, 0.0), zeros, ~finite, torch.ones_like(zeros)])
        torch.maximum(self.largest, largest.where(finite, 0.0), out=self.largest)


class GradientTotals:
    """An ``OnGradients``: adds up, on their device, what the gradients of some steps look like.

    Steps with inf or NaN in a gradient count as ``overflow``, and take no part in its magnitudes.
    """

    def __init__(self) -> None:
        self._totals: dict[tuple[int, ...], _Total] = {}  # by the parameters that step together

    def __bool__(self) -> bool:
        return bool(self._totals)

    @torch.no_grad()
    def __call__(self, all_rows: Sequence[ParamRows], inverse: Number) -> None:
        """Add a step.

        Args:
            all_rows: with the gradients of the step.
            inverse: what makes them unscaled.
        """
        for rows in all_rows:
            key = tuple(map(id, rows.params))
            if key not in self._totals:
                self._totals[key] = _Total(rows)
            self._totals[key].add(rows.survey(), inverse)

    def take(self, names: Mapping[int, str]) -> Totals:
        """The totals since the last call, on their way to the host.

        Args:
            names: of the parameters, by their ``id``. Others are left out.
        """
        totals, self._totals = list(self._totals.values()), {}
        return Totals(totals, names)


class Totals:
    """The totals of some steps, on their way to the host."""

    def __init__(self, totals: Sequence[_Total], names: Mapping[int, str]) -> None:
        self._params = [[(names.get(id(p), ""), p.dtype, local(p).numel()) for p in total.params] for total in totals]
        self._fetched = [Fetched(torch.cat([total.sums, total.largest[None]])) for total in totals]

    @property
    def ready(self) -> bool:
        """Whether ``into`` need not wait."""
        return all(fetched.ready for fetched in self._fetched)

    def into(self, rows: Sequence[Row], step: int) -> list[Row]:
        """The same rows; those of gradients have the magnitudes, zeros and overflows of all the steps.

        A parameter that had a gradient in other steps only gets a row, too, without what only a sample shows.

        Args:
            rows: of one step.
            step: its number.
        """
        sums: dict[str, list[float]] = {}
        missing: dict[str, Row] = {}
        for params, fetched in zip(self._params, self._fetched, strict=True):
            for (name, dtype, numel), (*line, largest) in zip(params, fetched.get().T.tolist(), strict=True):
                if name:
                    known = sums.setdefault(name, [0.0] * 5)
                    sums[name] = [*(a + b for a, b in zip(known, line, strict=False)), max(known[4], largest)]
                    missing[name] = Row(step, name, "grad", dtype=str(dtype).removeprefix("torch."), numel=numel)
        made = []
        for row in rows:
            is_known = row.tensor == "grad" and missing.pop(row.module, None) is not None
            made.append(_with(row, *sums[row.module]) if is_known else row)
        return [*made, *(_with(row, *sums[name]) for name, row in missing.items())]


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
