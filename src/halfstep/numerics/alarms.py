"""What the rows of a monitored run say is wrong, or about to go wrong."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable

import torch

from ..findings.finding import Finding, grouped, log, share
from .row import Row
from .survey import About

__all__ = ["Alarms"]

_KEPT = 6  # sampled steps that a trend is drawn through
_FEWEST = 3
_AHEAD = 30  # steps: an overflow that is further away is no news
_NEAR = 1.0  # doublings
_TREND = 8.0  # doublings: a trend says nothing about a tensor with more headroom than this
_FLUSHED = 0.01
_FIX = "keep the module in float32 (excluded_layers, an op list), use bfloat16, or see why it grows"


class Alarms:
    """Looks at rows as they come, and logs what is new in them.

    - HS116: an output holds inf or NaN, or comes close to the largest number of its dtype: either less than a doubling
      is left, or it would overflow within 30 steps if it went on growing as it did over the last sampled steps.
      Gradients do not count: a loss scale grows until they overflow, on purpose.
    - HS117: 1 % or more of a gradient has become 0, because the numbers were too small for their dtype.

    Attributes:
        steps: how many steps ``add_step`` has seen.
    """

    def __init__(self) -> None:
        self._headrooms: dict[tuple[str, int], deque[tuple[int, float]]] = defaultdict(lambda: deque(maxlen=_KEPT))
        self._near: dict[str, tuple[int, float, float]] = {}
        self._overflowed: dict[str, int] = {}
        self._flushed: dict[str, tuple[int, float]] = {}
        self.steps = 0

    def add_outputs(self, outputs: Iterable[tuple[About, torch.dtype, float]]) -> None:
        """Look at what modules returned in one step: which, in what dtype, and its largest magnitude."""
        before = len(self._overflowed), len(self._near)
        for about, dtype, amax in outputs:
            self._add_output(about, Row(*about, dtype=str(dtype).removeprefix("torch."), amax=amax).headroom)
        after = len(self._overflowed), len(self._near)
        if (not before[0] and after[0]) or (before == (0, 0) and after[1]):
            self._log("HS116")

    def add_step(self, rows: Iterable[Row]) -> None:
        """Look at all rows of one step."""
        known = set(self._flushed)
        self.steps += 1
        for row in rows:
            if row.tensor in ("grad", "output_grad") and row.flushed >= _FLUSHED:
                name = f"{row.module} ({row.tensor})"
                worst = max(row.flushed, self._flushed.get(name, (0, 0.0))[1])
                self._flushed[name] = (row.numel, worst)
        if not known:
            self._log("HS117")

    def findings(self) -> list[Finding]:
        """What was found so far."""
        found = []
        if self._overflowed:
            name, step = next(iter(self._overflowed.items()))
            found.append(
                Finding(
                    "HS116",
                    "error",
                    ", ".join(self._overflowed),
                    f"at step {step} the output of {name} holds inf or NaN; it is the first such output",
                    {"step": step, "steps_left": 0.0},
                    _FIX,
                )
            )
        elif self._near:
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
                    _FIX,
                )
            )
        if self._flushed:
            sizes = {name: numel for name, (numel, _) in self._flushed.items()}
            worst = max(lost for _, lost in self._flushed.values())
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

    def _log(self, code: str) -> None:
        log((finding for finding in self.findings() if finding.code == code), by="halfstep.numerics.Monitor")

    def _add_output(self, about: About, headroom: float) -> None:
        history = self._headrooms[about.module, about.call]
        if headroom == -math.inf:
            history.clear()
            self._overflowed.setdefault(about.module, about.step)
            return
        if headroom == math.inf:
            return
        history.append((about.step, headroom))
        left = 0.0 if headroom < _NEAR else math.inf
        if left and headroom < _TREND and len(history) >= _FEWEST:
            left = _steps_left(history)
        if left <= _AHEAD:
            self._near.setdefault(about.module, (about.step, headroom, left))


def _steps_left(history: Iterable[tuple[int, float]]) -> float:
    """When a line through the headrooms reaches 0, in steps from the last; inf if it may as well be level.

    It falls if its slope is twice its standard error below 0.
    """
    steps, headrooms = (torch.tensor(column, dtype=torch.float64) for column in zip(*history, strict=True))
    apart, above = steps - steps.mean(), headrooms - headrooms.mean()
    spread = apart.square().sum()
    slope = (apart * above).sum() / spread
    error = ((above - slope * apart).square().sum() / (len(steps) - 2) / spread).sqrt()
    return float(headrooms[-1] / -slope) if slope < -2 * error else math.inf
