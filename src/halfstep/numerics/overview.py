"""The rows of a run by tensor, and how its updates lie on the grid of its weights: what reports draw."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..observe.row import Row

__all__ = ["Grid", "Tensor", "grids", "tensors_of"]


@dataclass(frozen=True)
class Tensor:
    """One tensor over the steps of a run.

    Attributes:
        name: of its module, with the call where there are several.
        kind: "output", "output_grad", "grad", "update" or "weight".
        rows: in the order of steps.
        exponents: the counts of all steps.
    """

    name: str
    kind: str
    rows: tuple[Row, ...]
    exponents: dict[int, int]

    @property
    def last(self) -> Row:
        """That of the latest step."""
        return self.rows[-1]

    @property
    def headroom(self) -> float:
        """The least of all steps."""
        return min(row.headroom for row in self.rows)

    def mean(self, share: Callable[[Row], float]) -> float:
        """The mean of a share over the steps where it is known; NaN if it never is."""
        known = [value for row in self.rows if not math.isnan(value := share(row))]
        return sum(known) / len(known) if known else math.nan


def tensors_of(rows: Iterable[Row]) -> list[Tensor]:
    """The rows by tensor, in the order in which they first came."""
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
class Grid:
    """The updates of one parameter, measured in half units in the last place (ulp) of its weights.

    Attributes:
        name: of the parameter.
        dtype: of the weights.
        shares: by the exponent of |update| / (ulp(weight) / 2): below 0 an update rounds away.
        lost: the share of updates that round away. Updates of 0 are not counted.
    """

    name: str
    dtype: str
    shares: dict[int, float]
    lost: float


def grids(rows: Iterable[Row]) -> list[Grid]:
    """How the updates of a run lie on the grid of the weights, by parameter.

    Rows know how large updates and weights are, but not which belongs to which. So sizes are taken as independent.

    Args:
        rows: those of "update" and "weight" at the same step are used.
    """
    pairs: dict[str, list[tuple[Row, Row]]] = defaultdict(list)
    weights = {(row.step, row.module): row for row in rows if row.tensor == "weight" and row.exponents}
    for row in rows:
        weight = weights.get((row.step, row.module))
        if row.tensor == "update" and row.exponents and weight is not None:
            pairs[row.module].append((row, weight))
    return [_grid_of(name, those) for name, those in pairs.items()]


def _grid_of(name: str, pairs: Sequence[tuple[Row, Row]]) -> Grid:
    shares: dict[int, float] = defaultdict(float)
    for update, weight in pairs:
        lowest = weight.range.normal
        digits = 1 + lowest - weight.range.subnormal
        all_pairs = sum(update.exponents.values()) * sum(weight.exponents.values()) * len(pairs)
        for of_weight, weight_count in weight.exponents.items():
            half_ulp = max(of_weight, lowest) - digits
            for of_update, count in update.exponents.items():
                shares[of_update - half_ulp] += count * weight_count / all_pairs
    return Grid(name, pairs[-1][1].dtype, dict(shares), sum(share for at, share in shares.items() if at < 0))
