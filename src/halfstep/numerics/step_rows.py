"""The rows of one sampled step, whose numbers are on their way to the host."""

from __future__ import annotations

from dataclasses import replace

from ..observe.names import OUTSIDE, ROOT
from ..observe.row import Row, merge_rows
from .gradients import GradientTotals
from .survey import Looked, Survey

__all__ = ["StepRows"]


class StepRows:
    """The numbers of a sampled step. Rows take more memory, so they are made only when somebody asks for them.

    Args:
        survey: the tensors that were looked at.
        totals: finished, of the gradients of this step and of those since the last sampled one.
    """

    def __init__(self, survey: Survey, totals: GradientTotals) -> None:
        self._survey, self._totals = survey, totals

    @property
    def ready(self) -> bool:
        """Whether rows can be made without waiting."""
        return self._totals.ready and self._survey.ready

    def rows(self, *, bins: bool = False, brief: bool = False) -> list[Row]:
        """The rows, in the order of execution; with histograms, or without what takes time, as of ``Survey.rows``."""
        seen = self._survey.rows(bins=bins, brief=brief)
        bad = {looked.number for looked, row in seen if not row.is_finite}
        if bad:
            bad |= self._survey.bad_inputs()
            seen = [(each, row if row.is_finite else replace(row, began_in=_origin(each, bad))) for each, row in seen]
        return self._totals.into(merge_rows(row for _, row in seen))


def _origin(looked: Looked, bad: set[int]) -> str:
    """The innermost module that was running and got nothing but finite numbers."""
    names = (name for name, inputs in looked.callers if bad.isdisjoint(inputs))
    is_whole = bool(looked.callers) and looked.callers[-1][0] == ROOT
    return next(names, OUTSIDE if is_whole else "")
