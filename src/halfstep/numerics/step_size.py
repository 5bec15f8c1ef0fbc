"""The size of updates in relation to their weights, which shows a learning rate that is too high."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

from ..findings.finding import Finding, grouped, share
from ..observe.row import Row

__all__ = ["StepSizes"]

_Pair = tuple[Row, Row]  # an update, and its weights before the step

_LARGE = 0.25
"""An update of a quarter of the root mean square of its weights, or more, is too large: 0.001 to 0.05 is healthy."""

_MOST = 0.5  # of the weights must have such updates: a few that begin near 0 may
_GROWTH = 2.0  # between sampled steps
_GROWN = 0.1  # of the weights: smaller updates may grow, as in a warmup
_FIX = "lower the learning rate (try a tenth), or begin with a warmup, or clip gradients; it is no matter of precision"


class StepSizes:
    """The rule HS120: updates as large as the weights, or growing by the step.

    Too large is a step in which more than half of the weights get updates of a quarter of their own size or more. So is
    one in which they get a tenth, in updates that were at least twice as large as the ones before at each of the last
    two sampled steps. Weights that begin as zeros do not count, nor do updates with inf or NaN.
    """

    def __init__(self) -> None:
        self._began: dict[str, bool] = {}  # whether a weight was other than 0 when it was first seen
        self._last: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=3))  # how large its updates were
        self._found: Finding | None = None

    def add(self, rows: Iterable[Row]) -> None:
        """Look at the rows of one step."""
        if self._found is not None:
            return
        rows = [row for row in rows if row.tensor in ("weight", "update")]
        weights = {row.module: row for row in rows if row.tensor == "weight"}
        for name, weight in weights.items():
            self._began.setdefault(name, weight.rms > 0.0)
        updates = [row for row in rows if row.tensor == "update" and row.is_finite]
        pairs = [(row, weights[row.module]) for row in updates if self._began.get(row.module)]
        for update, _ in pairs:
            self._last[update.module].append(_size(update))
        large = [pair for pair in pairs if _ratio(pair) >= _LARGE]
        growing = [pair for pair in pairs if _ratio(pair) >= _GROWN and self._grows(pair[0].module)]
        for kind, found in (("large", large), ("growing", growing)):
            if _numel(found) > _MOST * _numel(pairs):
                self._found = _finding(kind, found, _numel(found) / _numel(pairs))
                return

    def finding(self) -> Finding | None:
        """HS120, as of the first such step."""
        return self._found

    def _grows(self, name: str) -> bool:
        last = self._last[name]
        return len(last) == 3 and all(b >= _GROWTH * a > 0.0 for a, b in itertools.pairwise(last))


def _finding(kind: str, found: Sequence[_Pair], part: float) -> Finding:
    largest = max(found, key=lambda pair: pair[0].numel)
    update, ratio = largest[0], _ratio(largest)
    size = "a quarter of their own size or more"
    how = size if kind == "large" else "a tenth of their own size or more, twice as large each time"
    return Finding(
        "HS120",
        "error",
        grouped({each.module: each.numel for each, _ in found}),
        f"at step {update.step} the learning rate is too high: {share(part)} of the weights get updates of {how}; "
        f"{update.module} gets {ratio:.2g} times its size",
        {"step": update.step, "share": part, "ratio": ratio},
        _FIX,
    )


def _ratio(pair: _Pair) -> float:
    update, weight = pair
    return _size(update) / weight.rms if weight.rms else math.inf


def _size(update: Row) -> float:
    """The root mean square of the updates that are there: most rows of an embedding have none."""
    return update.rms / math.sqrt(1.0 - update.zeros) if update.zeros < 1.0 else 0.0


def _numel(pairs: Iterable[_Pair]) -> int:
    return sum(update.numel for update, _ in pairs)
