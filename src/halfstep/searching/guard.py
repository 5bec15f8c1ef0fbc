"""``Guard``: says whether a candidate trains like fp32, by paired losses on the same batches and random numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, NamedTuple

from torch import nn

from ..core.checks import check_count, check_number
from ..core.errors import ArgumentTypeError

__all__ = ["Guard", "Outcome", "compared", "tolerance_of"]

_LEAST = 1e-3
"""The least tolerance by default, as a share of the loss: an end loss is to be within 0.1 % of fp32."""


@dataclass(frozen=True)
class Guard:
    """A test that a candidate has the loss of fp32.

    A run takes the same batches, with the same random numbers, as the runs in fp32. It passes if the interval of
    Student's t around the mean difference of the loss, at 95 %, lies within the tolerance, and if the gradients of its
    last batch are finite.

    Attributes:
        metric: a function that is called as ``metric(model, batch)`` and returns a number; None for the loss.
        tolerance: the largest difference that passes, in units of the loss. None is two standard errors of fp32 runs
            against each other, which differ in their random numbers, and at least 0.1 % of the loss.
        runs: the number of fp32 runs. Where random numbers matter, a candidate runs as often.
    """

    metric: Callable[[nn.Module, Any], Any] | None = None
    tolerance: float | None = None
    runs: int = 2

    def __post_init__(self) -> None:
        if self.metric is not None and not callable(self.metric):
            raise ArgumentTypeError(f"metric={self.metric!r} must be a function of (model, batch), or None.")
        if self.tolerance is not None:
            check_number("tolerance", self.tolerance)
        check_count("runs", self.runs)


class Outcome(NamedTuple):
    """The result of a guarded run.

    Attributes:
        passed: True if the loss is the loss of fp32, within the tolerance.
        loss: the mean loss; inf if the loss of a batch, or a gradient of the last batch, is not finite.
        reference: the mean loss in fp32.
        difference: the mean difference of the two.
        spread: half of the width of its interval.
    """

    passed: bool
    loss: float
    reference: float
    difference: float
    spread: float


def compared(losses: Sequence[float], reference: Sequence[float], tolerance: float) -> Outcome:
    """Compare the losses of a run with the losses of fp32 on the same batches."""
    differences = [one - other for one, other in zip(losses, reference, strict=True)]
    mean = fmean(differences)
    spread = _quantile(len(differences) - 1) * _error(differences) if math.isfinite(mean) else math.inf
    passed = abs(mean) + spread <= tolerance
    return Outcome(passed, fmean(losses), fmean(reference), mean, spread)


def tolerance_of(guard: Guard, runs: Sequence[Sequence[float]]) -> float:
    """The tolerance of a guard, from runs in fp32."""
    if guard.tolerance is not None:
        return guard.tolerance
    noise = [2.0 * _error([a - b for a, b in zip(runs[0], other, strict=True)]) for other in runs[1:]]
    return max([_LEAST * abs(fmean(runs[0])), *noise])


def _error(values: Sequence[float]) -> float:
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def _quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t; exact for one and two degrees of freedom, else a series in 1 / freedom."""
    if freedom < 3:
        return (0.0, 12.706, 4.303)[freedom]
    z, v = 1.959964, freedom
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / v + second / v**2 + third / v**3
