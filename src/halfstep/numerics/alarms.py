"""What the rows of a monitored run say is wrong, or about to go wrong."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Iterable

from ..findings.finding import Finding, grouped, log, share
from .row import Row

__all__ = ["Alarms"]

_KEPT = 6  # sampled steps that a trend is drawn through
_FEWEST = 3
_AHEAD = 30  # steps: an overflow that is further away is no news
_NEAR = 1.0  # doublings
_TREND = 8.0  # doublings: a trend says nothing about a tensor with more headroom than this
_FLUSHED = 0.01


class Alarms:
    """Looks at rows as they come, and logs what is new in them.

    - HS116: an output comes close to the largest number of its dtype. Either less than a doubling is left, or it would
      overflow within 30 steps if it went on growing as it did over the last sampled steps. Gradients do not count: a
      loss scale grows until they overflow, on purpose.
    - HS117: 1 % or more of a gradient has become 0, because the numbers were too small for their dtype.
    """

    def __init__(self) -> None:
        self._headrooms: dict[tuple[str, int], deque[tuple[int, float]]] = defaultdict(lambda: deque(maxlen=_KEPT))
        self._near: dict[str, tuple[int, float, float]] = {}
        self._flushed: dict[str, tuple[int, int, float]] = {}

    def add(self, rows: Iterable[Row]) -> None:
        """Look at the rows of one step."""
        known = {finding.code for finding in self.findings()}
        for row in rows:
            if row.tensor == "output":
                self._add_output(row)
            elif row.tensor in ("grad", "output_grad") and row.flushed >= _FLUSHED:
                name = f"{row.module} ({row.tensor})"
                worst = max(row.flushed, self._flushed.get(name, (0, 0, 0.0))[2])
                self._flushed[name] = (row.step, row.numel, worst)
        log(finding for finding in self.findings() if finding.code not in known)

    def findings(self) -> list[Finding]:
        """What was found so far."""
        found = []
        if self._near:
            name, (step, headroom, left) = min(self._near.items(), key=lambda item: item[1][2])
            soon = f"about {left:.0f} steps away if it grows on like this" if left else "less than a doubling away"
            found.append(
                Finding(
                    "HS116",
                    "warning",
                    ", ".join(self._near),
                    f"at step {step} the output of {name} has {headroom:.1f} doublings left to the largest number of "
                    f"its dtype; an overflow is {soon}",
                    {"step": step, "headroom": headroom, "steps_left": left},
                    "keep the module in float32 (excluded_layers, an op list), use bfloat16, or see why it grows",
                )
            )
        if self._flushed:
            sizes = {name: numel for name, (_, numel, _) in self._flushed.items()}
            worst = max(lost for _, _, lost in self._flushed.values())
            found.append(
                Finding(
                    "HS117",
                    "warning",
                    grouped(sizes),
                    f"up to {share(worst)} of these gradients became 0, because they are too small for their dtype",
                    {"flushed": worst},
                    "use a loss scale, or a larger one (init_scale, max_loss_scale), or bfloat16",
                )
            )
        return found

    def _add_output(self, row: Row) -> None:
        history = self._headrooms[row.module, row.call]
        headroom = row.headroom
        if not math.isfinite(headroom):
            history.clear()
            return
        history.append((row.step, headroom))
        if headroom < _NEAR:
            self._near.setdefault(row.module, (row.step, headroom, 0.0))
        elif headroom < _TREND and len(history) >= _FEWEST:
            left = _steps_left(history)
            if left <= _AHEAD:
                self._near.setdefault(row.module, (row.step, headroom, left))


def _steps_left(history: Iterable[tuple[int, float]]) -> float:
    """When a line through the headrooms reaches 0, in steps from the last; inf if they do not all fall."""
    steps = [step for step, _ in history]
    headrooms = [headroom for _, headroom in history]
    if any(after >= before for before, after in itertools.pairwise(headrooms)):
        return math.inf
    mean_step, mean = sum(steps) / len(steps), sum(headrooms) / len(headrooms)
    spread = sum((step - mean_step) ** 2 for step in steps)
    slope = sum((s - mean_step) * (h - mean) for s, h in zip(steps, headrooms, strict=True)) / spread
    return headrooms[-1] / -slope
