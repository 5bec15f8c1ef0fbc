"""The data that reports draw: the rows of a run by tensor."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..observe.row import Row

__all__ = ["Tensor", "tensors_of"]


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
