"""Alarms of a monitored run: findings by its rows, of what is wrong or about to go wrong."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from operator import attrgetter

import torch

from ..core.text import listed
from ..findings.finding import Finding, grouped, share
from ..observe.names import OUTSIDE, owner_of
from ..observe.row import Row
from .step_size import StepSizes
from .zero_gradients import ZeroGradients

__all__ = ["Alarms", "findings_in"]

_KEPT = 6  # sampled steps that a trend is drawn through
_FEWEST = 3
_AHEAD = 30  # steps: an overflow that is further away is no news
_NEAR = 1.0  # doublings
_TREND = 8.0  # doublings: a trend says nothing about a tensor with more headroom than this
_FLUSHED = 0.01
_FIX = "keep the module in float32 (excluded_layers, an op list), use bfloat16, or see why it grows"

_AFTER = "lower the learning rate first: HS120 came before"
_NAMED = 4


class Alarms:
    """Rules over the rows of a run, as they come, step by step.

    - HS116: an output holds inf or NaN, or comes close to the largest number of its dtype: either less than a doubling
      is left, or it would overflow within 30 steps if it went on growing as it did over the last sampled steps.
      Gradients do not count: a loss scale grows until they overflow, on purpose.
    - HS117: 1 % or more of a gradient has become 0, because the numbers were too small for their dtype.
    - HS120: steps are as large as the weights; see ``StepSizes``.
    - HS121: gradients are 0 from the start; see ``ZeroGradients``.

    Attributes:
        counted: how many steps ``add_counted`` has seen.
    """

    def __init__(self) -> None:
        self.counted = 0
        self._headrooms: dict[tuple[str, int], deque[tuple[int, float]]] = defaultdict(lambda: deque(maxlen=_KEPT))
        self._near: dict[str, tuple[int, float, float]] = {}
        self._overflow: tuple[Row, str] | None = None
        self._overflowed: dict[str, int] = {}
        self._flushed: dict[str, tuple[int, float]] = {}
        self._sizes = StepSizes()
        self._zeros = ZeroGradients()
        self._reported: set[tuple[str, str]] = set()

    def add(self, rows: Sequence[Row]) -> None:
        """Look at the rows of one step, with histograms or without."""
        for row in rows:
            if row.tensor == "output":
                self._add_output(row)
        if self._overflow is None and (bad := _first_bad(rows)) is not None:
            self._overflow = bad, f"at step {bad.step} {_said_of(bad, rows)}"
        self._sizes.add(rows)
        self._zeros.add(rows)

    def add_counted(self, rows: Iterable[Row]) -> None:
        """Look at the same rows with histograms, which take longer to make."""
        self.counted += 1
        for row in rows:
            if row.tensor in ("grad", "output_grad") and row.flushed >= _FLUSHED:
                name = f"{row.module} ({row.tensor})"
                worst = max(row.flushed, self._flushed.get(name, (0, 0.0))[1])
                self._flushed[name] = (row.numel, worst)

    def news(self) -> list[Finding]:
        """The findings of a code and a severity that no earlier call has returned."""
        found = [each for each in self.findings() if (each.code, each.severity) not in self._reported]
        self._reported |= {(each.code, each.severity) for each in found}
        return found

    def findings(self) -> list[Finding]:
        """The findings so far, the likely cause first: steps that are too large make overflows."""
        found = [*self._zeros.findings(), *self._of_gradients()]
        too_large = self._sizes.finding()
        if too_large is None:
            return [*self._of_outputs(_FIX), *found]
        if self._overflow is not None and self._overflow[0].step <= too_large.evidence["step"]:
            return [*self._of_outputs(_FIX), too_large, *found]
        return [too_large, *self._of_outputs(_AFTER), *found]

    def _of_outputs(self, fix: str) -> list[Finding]:
        if self._overflow is not None:
            bad, message = self._overflow
            first = [name for name in (bad.began_in, bad.module) if name not in ("", OUTSIDE)]
            where = listed(list(dict.fromkeys([*first, *self._overflowed])), _NAMED)
            known = {"step": bad.step, "steps_left": 0.0, "module": first[0]}
            return [Finding("HS116", "error", where, message, known, fix)]
        if self._near:
            name, (step, headroom, left) = min(self._near.items(), key=lambda item: item[1][2])
            soon = f"about {left:.0f} steps away if it grows on like this" if left else "less than a doubling away"
            return [
                Finding(
                    "HS116",
                    "warning",
                    listed(list(self._near), _NAMED),
                    f"at step {step} the output of {name} has {headroom:.1f} doublings left to the largest number of "
                    f"its dtype; an overflow is {soon}",
                    {"step": step, "headroom": headroom, "steps_left": left},
                    fix,
                )
            ]
        return []

    def _of_gradients(self) -> list[Finding]:
        if not self._flushed:
            return []
        sizes = {name: numel for name, (numel, _) in self._flushed.items()}
        worst = max(self._flushed, key=lambda name: self._flushed[name][1])
        lost = self._flushed[worst][1]
        return [
            Finding(
                "HS117",
                "warning",
                grouped(sizes),
                f"up to {share(lost)} of these gradients became 0, because they are too small for their dtype; most "
                f"of {worst}",
                {"flushed": lost},
                "use a loss scale, or a larger one (init_scale, max_loss_scale), or bfloat16",
            )
        ]

    def _add_output(self, row: Row) -> None:
        history = self._headrooms[row.module, row.call]
        headroom = row.headroom
        if headroom == -math.inf:
            history.clear()
            self._overflowed.setdefault(row.module, row.step)
            return
        if headroom == math.inf:
            return
        history.append((row.step, headroom))
        left = 0.0 if headroom < _NEAR else math.inf
        if left and headroom < _TREND and len(history) >= _FEWEST:
            left = _steps_left(history)
        if left <= _AHEAD:
            self._near.setdefault(row.module, (row.step, headroom, left))


def findings_in(rows: Iterable[Row]) -> list[Finding]:
    """The findings by all rows of a run, the likely cause first."""
    alarms = Alarms()
    for _, of_step in itertools.groupby(sorted(rows, key=attrgetter("step")), key=attrgetter("step")):
        found = list(of_step)
        alarms.add(found)
        alarms.add_counted(found)
    return alarms.findings()


def _first_bad(rows: Iterable[Row]) -> Row | None:
    """The first output of a step with inf or NaN; None if all are finite."""
    return next((row for row in rows if row.tensor == "output" and not row.is_finite), None)


def _said_of(bad: Row, rows: Iterable[Row]) -> str:
    """The sentence about an output with inf or NaN: where they came from."""
    name = bad.module.partition("[")[0]
    holds = f"the output of {bad.module} holds inf or NaN"
    spoilt = [
        row.module.rpartition(".")[2]
        for row in rows
        if row.tensor == "weight" and not row.is_finite and owner_of(row.module) == name
    ]
    if spoilt:
        return f"{holds}; so does its {spoilt[0]} before the step, which an earlier step has spoilt"
    if bad.began_in == OUTSIDE:
        return f"{holds}; so does what goes into the model: look at the batch"
    if bad.began_in in ("", name):
        return f"{holds}; what goes into it is finite" if bad.began_in else f"{holds}; it is the first such output"
    return f"inf or NaN begins inside of {bad.began_in}: what goes into that is finite, what goes into {name} is not"


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
