"""Alarms of a monitored run: findings from its rows about present and imminent problems.

A ``History`` keeps the rows of one tensor that the rules need. The rules are functions of the histories.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from statistics import linear_regression, pvariance

from ...core.text import listed
from ..findings.finding import Finding, grouped, share
from ..findings.rules_of_optimizer import ZERO_GRADIENTS_FIX
from ..observe.names import OUTSIDE, owner_of
from ..observe.row import Row

__all__ = ["Alarms", "findings_in"]

_KEPT = 6  # number of sampled steps through which a trend is fitted
_FEWEST = 3
_AHEAD = 30  # steps; an overflow further ahead is not reported
_NEAR = 1.0  # doublings
_TREND = 8.0  # doublings; the trend of a tensor with more headroom is ignored
_FLUSHED = 0.01

_LARGE = 0.25
"""An update of a quarter of the root mean square of its weights, or more, is too large: 0.001 to 0.05 is healthy."""

_MOST = 0.5  # share of the weights with such updates; a few weights that begin near 0 are fine
_GROWTH = 2.0  # between sampled steps
_GROWN = 0.1  # share of the weights; smaller updates may grow, as in a warmup

_FIX_OVERFLOW = "keep the module in float32 (excluded_layers={}), use bfloat16, or see why it grows"
_FIX_AFTER_HS120 = "lower the learning rate first: HS120 came before"
_FIX_FLUSHED = "use a loss scale, or a larger one (init_scale, max_loss_scale), or bfloat16"
_FIX_TOO_LARGE = (
    "lower the learning rate (try a tenth), or begin with a warmup, or clip gradients; precision is not the cause"
)
_NAMED = 4


@dataclass(eq=False)
class History:
    """The history of one tensor.

    Attributes:
        first: the row of the first step.
        recent: the latest rows, the newest last.
        moved: the first step at which the tensor was not all 0.
        near: the first row for which an overflow is predicted, and the predicted number of steps until then.
        flushed: the largest share of values that became 0.
    """

    first: Row
    recent: deque[Row] = field(default_factory=lambda: deque(maxlen=_KEPT))
    moved: int | None = None
    near: tuple[Row, float] | None = None
    flushed: float = 0.0

    def add(self, row: Row) -> None:
        """Add the row of a step."""
        self.recent.append(row)
        if self.moved is None and not (row.zeros == 1.0 and row.amax == 0.0):
            self.moved = row.step
        if self.near is None and row.tensor == "output" and (left := _steps_left(self.recent)) <= _AHEAD:
            self.near = row, left
        if row.tensor in ("grad", "output_grad") and row.flushed >= _FLUSHED:
            self.flushed = max(self.flushed, row.flushed)

    @property
    def last(self) -> Row:
        """The latest row."""
        return self.recent[-1]


_OfKind = dict[tuple[str, int], History]
"""The histories of one kind of tensor, by module or parameter and call, in order of first occurrence."""

_Histories = defaultdict[str, _OfKind]


class Alarms:
    """Rules that read the rows of a run step by step.

    - HS116: an output holds inf or NaN, or comes close to the largest number of its dtype: less than a doubling is
    left, or its growth over the last sampled steps would overflow within 30 steps. Gradients do not count, because a
    dynamic loss scale grows until they overflow.
    - HS117: 1 % or more of a gradient became 0 because the values were too small for their dtype.
    - HS120: updates are as large as the weights, or grow with every step. A step is too large if more than half of the
      weights get updates of at least a quarter of their own size, or of at least a tenth, if the updates also doubled
      at each of the last two sampled steps. Weights that begin as zeros do not count, nor do updates with inf or NaN.
    - HS121: gradients are 0 at every sampled step so far: either of all parameters, or of one module although the
    gradient of its output is not 0, so that its backward pass loses them. HS117 needs small numbers that are not 0 yet.
    """

    def __init__(self) -> None:
        self._histories: _Histories = defaultdict(dict)
        self._bad: dict[tuple[str, str, int], Row] = {}  # first row with inf or NaN of each output and weight
        self._too_large: Finding | None = None
        self._reported: set[tuple[str, str]] = set()

    def add(self, rows: Sequence[Row]) -> None:
        """Add the rows of one step."""
        for row in rows:
            of_kind, key = self._histories[row.tensor], (row.module, row.call)
            if key not in of_kind:
                of_kind[key] = History(row)
            of_kind[key].add(row)
            if row.tensor in ("output", "weight") and not row.is_finite:
                self._bad.setdefault((row.tensor, row.module, row.call), row)
        if rows and self._too_large is None:
            self._too_large = _too_large(self._histories, rows[0].step)

    def news(self) -> list[Finding]:
        """Return the findings whose code and severity no earlier call has returned."""
        found = [each for each in self.findings() if (each.code, each.severity) not in self._reported]
        self._reported |= {(each.code, each.severity) for each in found}
        return found

    def findings(self) -> list[Finding]:
        """Return the findings so far, the likely cause first: too large steps cause overflows."""
        large, bad = self._too_large, [row for row in self._bad.values() if row.tensor == "output"]
        large_first = large is not None and (not bad or large.evidence["step"] < bad[0].step)
        fix = _FIX_AFTER_HS120 if large_first else _FIX_OVERFLOW
        bad_weights = [row for row in self._bad.values() if row.tensor == "weight"]
        found = list(_overflow(bad, bad_weights, fix) if bad else _near(self._histories["output"], fix))
        if large is not None:
            found.insert(0 if large_first else 1, large)
        return [*found, *_zero(self._histories), *_flushed(self._histories)]


def findings_in(rows: Iterable[Row]) -> list[Finding]:
    """Return the findings from all rows of a run, the likely cause first."""
    alarms = Alarms()
    for _, of_step in itertools.groupby(sorted(rows, key=attrgetter("step")), key=attrgetter("step")):
        alarms.add(list(of_step))
    return alarms.findings()


# ---- HS116


def _overflow(bad: Sequence[Row], weights: Iterable[Row], fix: str) -> Iterator[Finding]:
    """Report the first output with inf or NaN, and whether its weights already held inf or NaN."""
    row = bad[0]
    first = [name for name in (row.began_in, row.module) if name not in ("", OUTSIDE)]
    where = listed(list(dict.fromkeys([*first, *(each.module for each in bad)])), _NAMED)
    known = {"step": row.step, "steps_left": 0.0, "module": first[0]}
    yield Finding("HS116", "error", where, f"at step {row.step} {_said_of(row, weights)}", known, fix.format(first[:1]))


def _near(outputs: _OfKind, fix: str) -> Iterator[Finding]:
    near = sorted((history.near for history in outputs.values() if history.near), key=lambda each: each[0].step)
    if near:
        row, left = min(near, key=lambda each: each[1])
        soon = f"about {left:.0f} steps away if it keeps growing at this rate" if left else "less than a doubling away"
        where = listed(list(dict.fromkeys(each.module for each, _ in near)), _NAMED)
        text = f"at step {row.step} the output of {row.module} has {row.headroom:.1f} doublings left to the largest "
        text += f"number of its dtype; an overflow is {soon}"
        known = {"step": row.step, "headroom": row.headroom, "steps_left": left}
        yield Finding("HS116", "warning", where, text, known, fix.format([row.module]))


def _said_of(bad: Row, weights: Iterable[Row]) -> str:
    """Write the sentence about an output with inf or NaN and their origin."""
    name = bad.module.partition("[")[0]
    holds = f"the output of {bad.module} holds inf or NaN"
    owned = [row.module for row in weights if owner_of(row.module) == name and row.step <= bad.step]
    if owned:
        return f"{holds}; an earlier step had already written inf or NaN to its {owned[0].rpartition('.')[2]}"
    if bad.began_in == OUTSIDE:
        return f"{holds}; so do the inputs of the model: check the batch"
    if bad.began_in in ("", name):
        return f"{holds}; its inputs are finite" if bad.began_in else f"{holds}; it is the first such output"
    return f"inf or NaN begins in {bad.began_in}, whose inputs are finite; the inputs of {name} are not"


def _steps_left(recent: Sequence[Row]) -> float:
    """Predict the number of steps until an overflow, from a line through the headrooms since the last overflow.

    The result is inf unless the slope of the line is below 0 by twice its standard error, and 0 if less than a doubling
    is left.
    """
    headroom = recent[-1].headroom
    if not _NEAR <= headroom < _TREND:
        return 0.0 if headroom < _NEAR else math.inf
    rows = [row for row in itertools.takewhile(lambda row: row.is_finite, reversed(recent)) if row.amax]
    if len({row.step for row in rows}) < _FEWEST:
        return math.inf
    steps, rooms = zip(*((row.step, row.headroom) for row in rows), strict=True)
    slope, start = linear_regression(steps, rooms)
    off = sum((room - start - slope * step) ** 2 for step, room in zip(steps, rooms, strict=True))
    error = math.sqrt(off / (len(steps) - 2) / (pvariance(steps) * len(steps)))
    return headroom / -slope if slope < -2 * error else math.inf


# ---- HS117


def _flushed(histories: _Histories) -> Iterator[Finding]:
    found = [history for kind in ("grad", "output_grad") for history in histories[kind].values() if history.flushed]
    if found:
        worst = max(found, key=lambda history: history.flushed)
        names = {f"{history.first.module} ({history.first.tensor})": history.last.numel for history in found}
        text = f"up to {share(worst.flushed)} of these gradients became 0, because they are too small for their dtype; "
        text += f"the largest share in {worst.first.module} ({worst.first.tensor})"
        yield Finding("HS117", "warning", grouped(names), text, {"flushed": worst.flushed}, _FIX_FLUSHED)


# ---- HS120


def _too_large(histories: _Histories, step: int) -> Finding | None:
    """Return HS120 for a step whose updates are too large, else None."""
    ratios, numel = dict[str, float](), dict[str, int]()
    updates = histories["update"]
    for key, update in updates.items():
        row, weight = update.last, histories["weight"].get(key)
        if row.step == step and row.is_finite and weight is not None and weight.first.rms > 0.0:
            ratios[row.module] = _size(row) / weight.last.rms if weight.last.rms else math.inf
            numel[row.module] = row.numel
    large = [name for name, ratio in ratios.items() if ratio >= _LARGE]
    growing = [name for name, ratio in ratios.items() if ratio >= _GROWN and _grows(updates[name, 0].recent)]
    ways = ((large, "a quarter of their size or more"), (growing, "a tenth of their size or more, doubling each time"))
    for names, how in ways:
        of = {name: numel[name] for name in names}
        if sum(of.values()) > _MOST * sum(numel.values()):
            part, most = sum(of.values()) / sum(numel.values()), max(names, key=numel.__getitem__)
            text = f"at step {step} the learning rate is too high: {share(part)} of the weights get updates of {how}; "
            text += f"the update of {most} is {ratios[most]:.2g} times its size"
            known = {"step": step, "share": part, "ratio": ratios[most]}
            return Finding("HS120", "error", grouped(of), text, known, _FIX_TOO_LARGE)
    return None


def _grows(updates: Iterable[Row]) -> bool:
    sizes = [_size(row) for row in updates if row.is_finite][-3:]
    return len(sizes) == 3 and all(b >= _GROWTH * a > 0.0 for a, b in itertools.pairwise(sizes))


def _size(update: Row) -> float:
    """Compute the root mean square of the nonzero updates: most rows of an embedding have none."""
    return update.rms / math.sqrt(1.0 - update.zeros) if update.zeros < 1.0 else 0.0


# ---- HS121


def _zero(histories: _Histories) -> Iterator[Finding]:
    grads = histories["grad"]
    zero = {name: history.first.numel for (name, _), history in grads.items() if history.moved is None}
    if not zero:
        return
    moved = {owner_of(name) for (name, _), history in grads.items() if history.moved is not None}
    outputs: dict[str, int] = {}
    for (name, _), history in histories["output_grad"].items():
        if history.moved is not None:
            outputs.setdefault(name, history.moved)
    owners = set(map(owner_of, zero))
    lost = sorted((name for name in outputs if name in owners and name not in moved), key=outputs.__getitem__)
    if not moved:
        step = min(history.first.step for history in grads.values())
        at = lost[0] if lost else next((name for name in reversed(outputs) if outputs[name] == step), OUTSIDE)
        text = f"all gradients are 0 from step {step} on: the backward pass of "
        text += f"{'the loss' if at == OUTSIDE else at} returns only zeros"
        yield Finding("HS121", "error", grouped(zero), text, {"step": step, "module": at}, ZERO_GRADIENTS_FIX)
    elif lost:
        step, at = outputs[lost[0]], lost[0]
        text = f"from step {step} on {at} receives a gradient, but the gradients of its parameters are 0"
        yield Finding("HS121", "warning", ", ".join(lost), text, {"step": step, "module": at}, ZERO_GRADIENTS_FIX)
