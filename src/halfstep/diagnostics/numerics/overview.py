"""The data that reports draw: the rows of a run by tensor, and its updates on the grid of the weights."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..observe.row import Row

__all__ = ["Tensor", "UpdateGrid", "grids", "tensors_of"]


@dataclass(frozen=True)
class Tensor:
    """One tensor over the steps of a run.

    Attributes:
        name: the name of the module, with the call if there are several.
        kind: "output", "output_grad", "grad", "update" or "weight".
        rows: the rows in the order of steps.
        exponents: the summed counts of all steps.
    """

    name: str
    kind: str
    rows: tuple[Row, ...]
    exponents: dict[int, int]

    @property
    def last(self) -> Row:
        """The row of the latest step."""
        return self.rows[-1]

    @property
    def headroom(self) -> float:
        """The smallest headroom of all steps."""
        return min(row.headroom for row in self.rows)

    def mean(self, share: Callable[[Row], float]) -> float:
        """Average a share over the steps for which it is known; NaN if there are none."""
        known = [value for row in self.rows if not math.isnan(value := share(row))]
        return sum(known) / len(known) if known else math.nan


def tensors_of(rows: Iterable[Row]) -> list[Tensor]:
    """Group rows by tensor, in order of first occurrence."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.tensor, row.module + (f" #{row.call}" if row.call else "")].append(row)
    found = []
    for (kind, name), those in groups.items():
        those.sort(key=lambda row: row.step)
        counts: Counter[int] = Counter()
        for row in those:
            counts.update(row.exponents)
        found.append(Tensor(name or "(model)", kind, tuple(those), dict(counts)))
    return found


@dataclass(frozen=True)
class UpdateGrid:
    """The updates of one parameter, measured in half units in the last place (ulp) of its weights.

    Attributes:
        name: the name of the parameter.
        dtype: the dtype of the weights.
        shares: the shares by the exponent of |update| / (ulp(weight) / 2); below 0 an update rounds away.
        lost: the share of updates that round away. Updates of 0 are not counted.
    """

    name: str
    dtype: str
    shares: dict[int, float]
    lost: float


def grids(rows: Iterable[Row]) -> list[UpdateGrid]:
    """Compute the distribution of a run's updates on the grid of the weights, by parameter.

    Rows have the sizes of updates and weights but not their pairing, so the sizes are assumed to be independent.

    Args:
        rows: the rows of the run, of which "update" and "weight" at the same step are used.
    """
    pairs: dict[str, list[tuple[Row, Row]]] = defaultdict(list)
    weights = {(row.step, row.module): row for row in rows if row.tensor == "weight" and row.exponents}
    for row in rows:
        weight = weights.get((row.step, row.module))
        if row.tensor == "update" and row.exponents and weight is not None:
            pairs[row.module].append((row, weight))
    return [_grid_of(name, those) for name, those in pairs.items()]


def _grid_of(name: str, pairs: Sequence[tuple[Row, Row]]) -> UpdateGrid:
    shares: dict[int, float] = defaultdict(float)
    for update, weight in pairs:
        lowest = weight.range.normal
        digits = 1 + lowest - weight.range.subnormal
        all_pairs = sum(update.exponents.values()) * sum(weight.exponents.values()) * len(pairs)
        for of_weight, weight_count in weight.exponents.items():
            half_ulp = max(of_weight, lowest) - digits
            for of_update, count in update.exponents.items():
                shares[of_update - half_ulp] += count * weight_count / all_pairs
    return UpdateGrid(name, pairs[-1][1].dtype, dict(shares), sum(share for at, share in shares.items() if at < 0))
