"""What ``fit``, ``evaluate`` and ``predict`` call on their way, and the two that show how far they are."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from .model import Model

__all__ = ["Callback", "Lines", "ProgressBar", "call"]

_log = logging.getLogger("halfstep")

Logs = Mapping[str, Any]


class Callback:
    """Override what you need. Steps and epochs count from 0; what ``logs`` holds of a batch are tensors on its device.

    Attributes:
        model: the ``Model``.
        params: ``epochs`` (of ``fit``) and ``steps``, the batches in an epoch, None where the loader has no length.
    """

    model: Model
    params: Mapping[str, int | None]

    def on_train_begin(self, logs: Logs) -> None:
        """Before the first epoch."""

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        """Before the first batch of an epoch."""

    def on_train_batch_begin(self, step: int, logs: Logs) -> None:
        """Before a batch."""

    def on_train_batch_end(self, step: int, logs: Logs) -> None:
        """After a batch; ``logs`` has its ``loss``."""

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """After an epoch and its evaluation: the last loss, the metrics, and what was evaluated as ``eval_...``.

        ``self.model.stop_training = True`` ends the training here, or after any batch.
        """

    def on_train_end(self, logs: Logs) -> None:
        """After the last epoch; ``logs`` as it had."""

    def on_eval_begin(self, logs: Logs) -> None:
        """Before an evaluation."""

    def on_eval_batch_end(self, step: int, logs: Logs) -> None:
        """After a batch of it; ``logs`` has its ``loss``."""

    def on_eval_end(self, logs: Logs) -> None:
        """After an evaluation; ``logs`` is what ``evaluate`` returns."""

    def on_predict_begin(self, logs: Logs) -> None:
        """Before a prediction."""

    def on_predict_batch_end(self, step: int, logs: Logs) -> None:
        """After a batch of it; ``logs`` has its ``outputs``."""

    def on_predict_end(self, logs: Logs) -> None:
        """After a prediction."""


def call(callbacks: list[Callback], event: str, *args: Any) -> None:
    """Tell each of them."""
    for callback in callbacks:
        getattr(callback, event)(*args)


class Lines(Callback):
    """``verbose=2``: lines at level INFO of the logger "halfstep"."""

    def __init__(self, log_freq: int) -> None:
        self._log_freq = log_freq
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        """Remember which one."""
        self._epoch = epoch

    def on_train_batch_end(self, step: int, logs: Logs) -> None:
        """One line every ``log_freq`` batches; reading the loss waits for the device."""
        if step % self._log_freq == 0:
            _log.info("epoch %d step %d %s", self._epoch + 1, step, shown(logs))

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """One line."""
        _log.info("epoch %d %s", epoch + 1, shown(logs))


class ProgressBar(Callback):
    """``verbose=1``: a bar for each epoch, evaluation or prediction."""

    def __init__(self, log_freq: int) -> None:
        self._log_freq = log_freq
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def close(self) -> None:
        """Give the terminal back, whatever has happened."""
        self._stop()

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        """A new bar."""
        self._start(f"epoch {epoch + 1}/{self.params['epochs']}")

    def on_train_batch_end(self, step: int, logs: Logs) -> None:
        """One batch further, with the loss every ``log_freq`` batches."""
        self._advance(logs if step % self._log_freq == 0 else {})

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """The bar stays, with what the epoch came to."""
        self._stop(logs)

    def on_eval_begin(self, logs: Logs) -> None:
        """A new bar."""
        self._start("evaluate")

    def on_eval_batch_end(self, step: int, logs: Logs) -> None:
        """One batch further."""
        self._advance({})

    def on_eval_end(self, logs: Logs) -> None:
        """The bar stays, with what was found."""
        self._stop(logs)

    def on_predict_begin(self, logs: Logs) -> None:
        """A new bar."""
        self._start("predict")

    def on_predict_batch_end(self, step: int, logs: Logs) -> None:
        """One batch further."""
        self._advance({})

    def on_predict_end(self, logs: Logs) -> None:
        """The bar stays."""
        self._stop()

    def _start(self, text: str) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, TextColumn("{task.fields[logs]}"))
        self._task = self._progress.add_task(text, total=self.params["steps"], logs="")
        self._progress.start()

    def _advance(self, logs: Logs) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.advance(self._task)
            if logs:
                self._progress.update(self._task, logs=shown(logs))

    def _stop(self, logs: Logs | None = None) -> None:
        if self._progress is not None and self._task is not None:
            if logs:
                self._progress.update(self._task, logs=shown(logs))
            self._progress.stop()
        self._progress = self._task = None


def shown(logs: Logs) -> str:
    """``loss 0.123 Accuracy 0.9``."""
    return " ".join(f"{name} {_number(value)}" for name, value in logs.items())


def _number(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    return f"{value:.4g}" if isinstance(value, float) else str(value)
