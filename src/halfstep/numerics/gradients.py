"""What the gradients of every step look like, from the read that a fused step makes anyway."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ..kernels.shards import local
from ..kernels.tensor_table import Number
from ..optimizers.param_rows import ParamRows
from .row import Row
from .survey import Fetched

__all__ = ["GradientTotals"]


class _Total:
    """The steps of some rows: five lines, added up where the gradients are."""

    def __init__(self, rows: ParamRows) -> None:
        self.rows = rows
        self.sums = torch.zeros(4, len(rows.params), dtype=torch.float64, device=rows.device)
        self.largest = torch.zeros(len(rows.params), dtype=torch.float64, device=rows.device)

    def add(self, inverse: Number) -> None:
        squares, zeros, largest = self.rows.survey()
        if isinstance(inverse, torch.Tensor):
            inverse = inverse.to(self.rows.device, non_blocking=True)
        squares, largest = squares * (inverse * inverse), largest * inverse
        finite = squares.isfinite() & largest.isfinite()
        self.sums += torch.stack([squares.where(finite, 0.0), zeros, ~finite, torch.ones_like(zeros)])
        torch.maximum(self.largest, largest.where(finite, 0.0), out=self.largest)


class GradientTotals:
    """An ``OnGradients``: adds up, on their device, what the gradients of some steps look like.

    Steps with inf or NaN in a gradient count as ``overflow``, and take no part in its magnitudes.
    """

    def __init__(self) -> None:
        self._totals: dict[int, _Total] = {}

    @torch.no_grad()
    def __call__(self, all_rows: Sequence[ParamRows], inverse: Number) -> None:
        """Add a step.

        Args:
            all_rows: with the gradients of the step.
            inverse: what makes them unscaled.
        """
        for rows in all_rows:
            if id(rows) not in self._totals:
                self._totals[id(rows)] = _Total(rows)
            self._totals[id(rows)].add(inverse)

    def take(self, names: Mapping[int, str]) -> Totals:
        """The totals since the last call, on their way to the host.

        Args:
            names: of the parameters, by their ``id``.
        """
        totals, self._totals = list(self._totals.values()), {}
        return Totals(totals, names)


class Totals:
    """The totals of some steps, on their way to the host."""

    def __init__(self, totals: Sequence[_Total], names: Mapping[int, str]) -> None:
        self._params = [[(names.get(id(p), ""), local(p).numel()) for p in total.rows.params] for total in totals]
        self._fetched = [Fetched(torch.cat([total.sums, total.largest[None]])) for total in totals]

    @property
    def arrived(self) -> bool:
        """Whether ``into`` need not wait."""
        return all(fetched.arrived for fetched in self._fetched)

    def into(self, rows: Sequence[Row]) -> list[Row]:
        """The same rows; those of gradients have the magnitudes, zeros and overflows of all the steps."""
        known: dict[str, tuple[float, ...]] = {}
        for params, fetched in zip(self._params, self._fetched, strict=True):
            for (name, numel), column in zip(params, fetched.get().T.tolist(), strict=True):
                known[name] = (numel, *column)
        return [_with(row, *known[row.module]) if row.tensor == "grad" and row.module in known else row for row in rows]


def _with(row: Row, numel: float, squares: float, zeros: float, bad: float, steps: float, largest: float) -> Row:
    good = max(steps - bad, 1.0)
    return replace(
        row,
        amax=largest if bad < steps else row.amax,
        rms=math.sqrt(squares / (good * numel)),
        zeros=zeros / (steps * numel),
        overflow=bad / steps,
        merged=int(steps),
    )
