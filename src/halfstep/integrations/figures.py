"""The precision metrics of a training as one dict to log, and a callback of ``Model.fit`` that logs them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from .. import amp
from ..core.checks import check_count
from ..core.errors import ArgumentTypeError
from ..diagnostics.findings import check
from ..paddle.model import Callback

__all__ = ["FiguresCallback", "figures", "sink"]


def figures(
    model: nn.Module, optimizers: Any, scaler: amp.GradScaler | None = None, monitor: Any = None
) -> dict[str, float]:
    """Collect the loss scale, the overflow count, the findings of ``halfstep.check`` and the numbers of a monitor.

    Args:
        model: the model to check.
        optimizers: an optimizer or a list of optimizers to check.
        scaler: the loss scaler; a disabled scaler, or None, adds nothing.
        monitor: any object whose ``latest()`` returns a dict of numbers to add; None for nothing.

    Returns:
        ``halfstep/loss_scale``, ``halfstep/overflows``, ``halfstep/findings``, and the number of findings of each code
        as ``halfstep/HS102`` and so on. Reads the device.
    """
    found: dict[str, float] = {}
    scaler = scaler if scaler is not None and scaler.is_enabled() else None
    if scaler is not None:
        found = {"halfstep/loss_scale": scaler.get_scale(), "halfstep/overflows": float(scaler.overflows())}
    codes = Counter(finding.code for finding in check(model, optimizers, scaler=scaler))
    found |= {f"halfstep/{name}": float(count) for name, count in [("findings", codes.total()), *codes.items()]}
    return found if monitor is None else found | dict(monitor.latest())


def sink(target: Any) -> Callable[[Mapping[str, float], int], None]:
    """Make a function ``(figures, step)`` that logs to a target.

    Args:
        target: a TensorBoard ``SummaryWriter``, a wandb run, a dict, which gets a list of ``(step, value)`` for each
            name, or a function ``(figures, step)``.

    Raises:
        ArgumentTypeError: for any other target.
    """
    if isinstance(target, dict):

        def collect(values: Mapping[str, float], step: int) -> None:
            for name, value in values.items():
                target.setdefault(name, []).append((step, value))

        return collect
    if hasattr(target, "add_scalar"):

        def write(values: Mapping[str, float], step: int) -> None:
            for name, value in values.items():
                target.add_scalar(name, value, step)

        return write
    if hasattr(target, "log"):
        return lambda values, step: target.log(dict(values), step=step)
    if not callable(target):
        raise ArgumentTypeError(f"{target!r} is no SummaryWriter, run of wandb, dict or function (figures, step).")
    return target  # type: ignore[no-any-return]


class FiguresCallback(Callback):
    """A callback of ``halfstep.Model.fit`` that logs ``figures``.

    Args:
        target: the destination; see ``sink``.
        every: batches between two logs, 1 or more.
        monitor: see ``figures``.
    """

    def __init__(self, target: Any, every: int = 50, monitor: Any = None) -> None:
        check_count("every", every)
        self._log, self._every, self._monitor = sink(target), every, monitor
        self._batches = 0

    def on_train_batch_end(self, step: int, logs: Mapping[str, Any]) -> None:
        """Log after every ``every`` batches, counted over all epochs."""
        self._batches += 1
        if self._batches % self._every == 0:
            model = self.model
            self._log(figures(model.network, model.optimizer, model.scaler, self._monitor), self._batches)
