"""``CheckPrecision``: a callback of ``Model.fit`` that checks the training and watches its steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.checks import check_count
from ...diagnostics.findings import Finding, Watch, check, watch
from ...diagnostics.findings.finding import log
from .callbacks import Callback

__all__ = ["CheckPrecision"]


class CheckPrecision(Callback):
    """Check once, after a batch, for settings that lose precision, and count lost updates during training.

    ::

        model.fit(data, callbacks=halfstep.model.CheckPrecision())

    The findings go to the logger "halfstep", in one line.

    Args:
        after: the batch, counted from 0, after which the model is checked. A few steps give the optimizer its state.
        every: see ``halfstep.watch``; None turns the watch off.

    Attributes:
        findings: the findings of the last ``fit``.

    Raises:
        ArgumentValueError: if ``after`` is not a whole number of at least 0.
    """

    def __init__(self, after: int = 1, every: int | None = 100) -> None:
        check_count("after", after, least=0)
        self.findings: list[Finding] = []
        self._after, self._left, self._every = after, after, every
        self._watch: Watch | None = None

    def on_train_begin(self, logs: Mapping[str, Any]) -> None:
        """Start the watch."""
        self.findings = []
        self._left = self._after
        if self._every is not None:
            self._watch = watch(self.model.optimizer, self._every)

    def on_train_batch_end(self, step: int, logs: Mapping[str, Any]) -> None:
        """Check the model after the batch that ``after`` names."""
        if self._left == 0:
            self.findings = check(self.model.network, self.model.optimizer, scaler=self.model.scaler)
            log(self.findings)
        self._left -= 1

    def close(self) -> None:
        """Stop the watch and add its measurements to ``findings``."""
        if self._watch is not None:
            self._watch.remove()
            self.findings = [*self.findings, *self._watch.findings()]
            self._watch = None
