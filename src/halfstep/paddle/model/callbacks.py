"""The interface of the callbacks of ``fit``, ``evaluate`` and ``predict``, and two callbacks that report progress."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch

from ...core.checks import check_count, check_kind
from ...core.errors import ArgumentValueError
from ...core.text import show_log

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = ["Callback", "Callbacks", "call", "calling", "check_running"]

_log = logging.getLogger("halfstep")

Logs = Mapping[str, Any]


class Callback:
    """The base class of callbacks: override the methods that you need.

    Steps and epochs count from 0; the ``logs`` of a batch hold device tensors.

    Attributes:
        model: the ``Model`` that runs the callback.
        params: ``epochs`` (of ``fit``) and ``steps``, the batches per epoch, or None if the loader has no length.
    """

    model: Any
    params: Mapping[str, int | None]

    def on_train_begin(self, logs: Logs) -> None:
        """Run before the first epoch."""

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        """Run before the first batch of an epoch."""

    def on_train_batch_begin(self, step: int, logs: Logs) -> None:
        """Run before a batch."""

    def on_train_batch_end(self, step: int, logs: Logs) -> None:
        """Run after a batch; ``logs`` has its ``loss``."""

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Run after an epoch and its evaluation; ``logs`` has the loss and metrics of both (``eval_...``).

        ``self.model.stop_training = True`` ends the training here, or after any batch.
        """

    def on_train_end(self, logs: Logs) -> None:
        """Run after the last epoch, with the ``logs`` of that epoch."""

    def on_eval_begin(self, logs: Logs) -> None:
        """Run before an evaluation."""

    def on_eval_batch_end(self, step: int, logs: Logs) -> None:
        """Run after a batch of an evaluation; ``logs`` has its ``loss``."""

    def on_eval_end(self, logs: Logs) -> None:
        """Run after an evaluation; ``logs`` is the dict that ``evaluate`` returns."""

    def on_predict_begin(self, logs: Logs) -> None:
        """Run before a prediction."""

    def on_predict_batch_end(self, step: int, logs: Logs) -> None:
        """Run after a batch of a prediction; ``logs`` has its ``outputs``."""

    def on_predict_end(self, logs: Logs) -> None:
        """Run after a prediction."""

    def close(self) -> None:
        """Run last, even after an error: remove hooks and close files here. An error raised here hides no other."""


Callbacks = Callback | Sequence[Callback] | None


def check_running(num_workers: Any, verbose: Any, callbacks: Any, num_iters: Any = None, **counts: Any) -> None:
    """Check the arguments that ``fit``, ``evaluate`` and ``predict`` share.

    Raises:
        ArgumentValueError: for a number that is not allowed.
        ArgumentTypeError: for a callback that is not a ``Callback``.
    """
    for name, count in {**counts, "num_iters": 1 if num_iters is None else num_iters}.items():
        check_count(name, count)
    check_count("num_workers", num_workers, least=0)
    if verbose not in (0, 1, 2):
        raise ArgumentValueError(f"verbose={verbose!r} must be 0, 1 or 2.")
    for callback in callbacks if isinstance(callbacks, Sequence) else [] if callbacks is None else [callbacks]:
        check_kind("callbacks", callback, Callback, "a halfstep.model.Callback, or a list of them")


def call(callbacks: list[Callback], event: str, *args: Any) -> None:
    """Call the method named ``event`` on each callback."""
    for callback in callbacks:
        getattr(callback, event)(*args)


@contextmanager
def calling(
    model: Any, given: Callbacks, steps: int | None, verbose: int, log_freq: int = 1, epochs: int = 1
) -> Iterator[tuple[list[Callback], list[Callback]]]:
    """Bind callbacks to a model while it runs; yields the user's callbacks, and these with the progress callback."""
    own = [given] if isinstance(given, Callback) else list(given or ())
    called = [*own, *([ProgressBar(log_freq)] if verbose == 1 else [Lines(log_freq)] if verbose == 2 else [])]
    for callback in called:
        callback.model = model
        callback.params = {"epochs": epochs, "steps": steps}
    try:
        yield own, called
    except BaseException:
        for callback in called:
            with suppress(Exception):  # the error that ended the run is the one to see
                callback.close()
        raise
    call(called, "close")


class Lines(Callback):
    """``verbose=2``: lines at level INFO of the logger "halfstep"; a user who asks for lines must see them."""

    def __init__(self, log_freq: int) -> None:
        show_log()
        self._log_freq = log_freq
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        """Remember the epoch for the lines of its batches."""
        self._epoch = epoch

    def on_train_batch_end(self, step: int, logs: Logs) -> None:
        """Log a line every ``log_freq`` batches; reading the loss waits for the device."""
        if step % self._log_freq == 0:
            _log.info("epoch %d step %d %s", self._epoch + 1, step, text_of(logs))

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Log a line."""
        _log.info("epoch %d %s", epoch + 1, text_of(logs))


class ProgressBar(Callback):
    """``verbose=1``: a bar for each epoch, evaluation or prediction.

    The finished bar stays on screen, with the results beside it, or below it if the line is too short for all of them.
    """

    def __init__(self, log_freq: int) -> None:
        self._log_freq = log_freq
        self._bar: tuple[Progress, TaskID] | None = None

    def close(self, logs: Logs | None = None) -> None:
        """End the bar, if there is one, and release the terminal."""
        if self._bar is not None:
            progress, task = self._bar
            results = text_of(logs or {})
            if results:
                progress.update(task, logs=results)
            below = _width(progress) > progress.console.width
            if below:
                progress.update(task, logs="")
            progress.stop()
            if below:
                progress.console.print(results, soft_wrap=True, highlight=False)
        self._bar = None

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        """Start a bar."""
        self._start(f"epoch {epoch + 1}/{self.params['epochs']}")

    def on_train_batch_end(self, step: int, logs: Logs) -> None:
        """Advance the bar, and show the loss every ``log_freq`` batches."""
        self._advance(logs if step % self._log_freq == 0 else {})

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """End the bar."""
        self.close(logs)

    def on_eval_begin(self, logs: Logs) -> None:
        """Start a bar."""
        self._start("evaluate")

    def on_eval_batch_end(self, step: int, logs: Logs) -> None:
        """Advance the bar."""
        self._advance({})

    def on_eval_end(self, logs: Logs) -> None:
        """End the bar."""
        self.close(logs)

    def on_predict_begin(self, logs: Logs) -> None:
        """Start a bar."""
        self._start("predict")

    on_predict_batch_end = on_eval_batch_end
    on_predict_end = on_eval_end

    def _start(self, text: str) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        progress = Progress(*columns, TextColumn("{task.fields[logs]}"))
        self._bar = progress, progress.add_task(text, total=self.params["steps"], logs="")
        progress.start()

    def _advance(self, logs: Logs) -> None:
        if self._bar is not None:
            progress, task = self._bar
            progress.advance(task)
            if logs:
                progress.update(task, logs=text_of(logs))


def _width(progress: Progress) -> int:
    """Measure the columns that a bar needs, including the text beside it."""
    console = progress.console
    table = progress.make_tasks_table(progress.tasks)
    return console.measure(table, options=console.options.update(width=10_000)).maximum


def text_of(logs: Logs) -> str:
    """Format logs as text, such as ``loss 0.123 Accuracy 0.9``."""
    return " ".join(f"{name} {_number(value)}" for name, value in logs.items())


def _number(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    return f"{value:.4g}" if isinstance(value, float) else str(value)
