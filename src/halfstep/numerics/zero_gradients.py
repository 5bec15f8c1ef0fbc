"""Gradients that are zero from the start: of the whole model, or of a module that a gradient came to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ..findings.finding import Finding, grouped
from ..findings.rules_of_gradients import ZERO_GRADIENTS_FIX
from ..observe.names import OUTSIDE, owner_of
from ..observe.row import Row

__all__ = ["ZeroGradients"]


class ZeroGradients:
    """The rule HS121: gradients that are 0 at every sampled step so far.

    Either all gradients of parameters are 0. Or those of one module are, although the gradient of its output is not:
    then they are lost inside of its backward pass. HS117 needs numbers that are small and not 0 yet.
    """

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}  # of parameters whose gradients were always 0
        self._moved: set[str] = set()
        self._lost: dict[str, int] = {}  # modules that got a gradient and handed on none, with the first step
        self._healthy: set[str] = set()
        self._first: int | None = None
        self._at = ""

    def add(self, rows: Sequence[Row]) -> None:
        """Look at the rows of one step."""
        grads = [row for row in rows if row.tensor == "grad"]
        if not grads:
            return
        for row in grads:
            if _is_zero(row):
                self._sizes.setdefault(row.module, row.numel)
            else:
                self._moved.add(row.module)
        outputs = [row for row in rows if row.tensor == "output_grad"]
        if self._first is None:
            self._first = grads[0].step
            came = [row.module for row in outputs if not _is_zero(row)]
            self._at = came[-1] if came else OUTSIDE
        by_owner: dict[str, list[Row]] = defaultdict(list)
        for row in grads:
            by_owner[owner_of(row.module)].append(row)
        for row in outputs:
            own = by_owner.get(row.module)
            if own and not _is_zero(row):
                if all(map(_is_zero, own)):
                    self._lost.setdefault(row.module, row.step)
                else:
                    self._healthy.add(row.module)

    def findings(self) -> list[Finding]:
        """HS121, or nothing."""
        zero = {name: size for name, size in self._sizes.items() if name not in self._moved}
        lost = [name for name in self._lost if name not in self._healthy]
        if not zero:
            return []
        if not self._moved:
            step, at = self._first, lost[0] if lost else self._at
            where, severity = grouped(zero), "error"
            text = f"all gradients are 0 from step {step} on"
            text += f": none comes out of the backward pass of {at}" if at != OUTSIDE else ": the loss gives none"
        elif lost:
            step, at = self._lost[lost[0]], lost[0]
            where, severity = ", ".join(lost), "warning"
            text = f"from step {step} on a gradient comes to {at}, and those of its parameters are 0"
        else:
            return []
        return [Finding("HS121", severity, where, text, {"step": step, "module": at}, ZERO_GRADIENTS_FIX)]  # type: ignore[arg-type]


def _is_zero(row: Row) -> bool:
    return row.zeros == 1.0 and row.amax == 0.0
