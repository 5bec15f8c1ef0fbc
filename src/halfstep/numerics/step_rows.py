"""The rows of one sampled step, whose numbers are on their way to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..observe.names import OUTSIDE, ROOT
from ..observe.row import Row, merge_rows
from .gradients import Totals
from .survey import Inputs, SampledTensor, Surveyed

__all__ = ["StepRows"]


class StepRows:
    """The numbers of a sampled step. Rows take more memory, so they are made only when somebody asks for them.

    Args:
        index: which step it is.
        surveyed: the tensors that were looked at.
        inputs: which of those that went into modules were finite.
        totals: the gradients of this step and of those since the last sampled one.
    """

    def __init__(self, index: int, surveyed: Sequence[Surveyed], inputs: Inputs | None, totals: Totals) -> None:
        self._index, self._surveyed, self._inputs, self._totals = index, surveyed, inputs, totals

    @property
    def ready(self) -> bool:
        """Whether rows can be made without waiting."""
        inputs = self._inputs is None or self._inputs.ready
        return inputs and self._totals.ready and all(each.ready for each in self._surveyed)

    def brief(self) -> list[Row]:
        """The rows without what takes time to make: see ``Surveyed.brief``."""
        return self._made([each for part in self._surveyed for each in part.brief()])

    def rows(self, *, bins: bool) -> list[Row]:
        """The rows, with histograms or without, in the order of execution."""
        return self._made([each for part in self._surveyed for each in part.rows(bins=bins)])

    def _made(self, seen: list[tuple[SampledTensor, Row]]) -> list[Row]:
        seen.sort(key=lambda each: each[0].number)
        bad = {tensor.number for tensor, row in seen if not row.is_finite}
        if bad:
            bad |= set() if self._inputs is None else self._inputs.bad()
            seen = [
                (tensor, row if row.is_finite else replace(row, began_in=_origin(tensor, bad))) for tensor, row in seen
            ]
        return self._totals.into(merge_rows(row for _, row in seen), self._index)


def _origin(tensor: SampledTensor, bad: set[int]) -> str:
    """The innermost module that was running and got nothing but finite numbers."""
    names = (name for name, inputs in tensor.callers if bad.isdisjoint(inputs))
    is_whole = bool(tensor.callers) and tensor.callers[-1][0] == ROOT
    return next(names, OUTSIDE if is_whole else "")
