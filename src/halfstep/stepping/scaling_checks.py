"""Warnings about gradients that bypass the loss scale or are scaled twice, once per kind and optimizer.

A step knows whether the optimizer has had a scaled pass, through a block or a ``GradScaler``. The checks run in a
subscriber of the window, which removes itself after the first step that uses scaled gradients.
"""

from __future__ import annotations

import warnings
from weakref import WeakKeyDictionary

import torch

from ..parameters.loss_scaler import DeviceLossScaler
from ..torch_internals.callers import caller_in, callers_level
from .backward import Subscriber, Window

__all__ = ["ForgottenScale", "warn_no_backward", "warn_scaled_twice"]

_warned: WeakKeyDictionary[Window, set[str]] = WeakKeyDictionary()
"""The kinds of warnings that were given for the optimizer of a window."""


class ForgottenScale(Subscriber):
    """Warns if an optimizer with a loss scale steps with gradients of an unscaled loss.

    The check ends with the first step that uses scaled gradients.

    Args:
        in_float16: True if gradients are computed in float16, where small ones become zero without a loss scale.
    """

    def __init__(self, in_float16: bool) -> None:
        self._in_float16 = in_float16
        self._scaled = False  # True after the first scaled pass; later passes may be replays of a CUDA graph
        self._judged = False  # True after a step with unscaled gradients: check such steps only once

    def closed(self, window: Window, scaler: DeviceLossScaler, scale: torch.Tensor) -> None:
        """Record that the optimizer has had a scaled pass."""
        self._scaled = True

    def stepping(self, window: Window) -> None:
        """Check the gradients of a step. With a closure this runs after the step, on the gradients of the closure.

        A step with learning rates of 0 uses no gradients: ``torch.distributed.checkpoint`` calls such steps to create
        optimizer state.
        """
        optimizer, release = window.table.optimizer(), window.release
        used = self._scaled or (release is not None and bool(release.stepped))
        used = used or any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
        if window.block is not None or not used or (self._judged and not self._scaled):
            return
        scaler = _torch_scaler()
        if self._scaled:
            window.subscribers.remove(self)
            if scaler is not None:
                warn_scaled_twice(window, f"torch's {scaler}")
        elif scaler is not None:
            self._judged = True  # user code chose torch's scaler instead
        elif self._in_float16 and any(group.get("lr") != 0.0 for group in optimizer.param_groups):
            self._judged = True
            _warn_once(
                window,
                "forgotten",
                f"{type(optimizer).__name__}.step() uses gradients that did not come through amp.scale_loss, and this "
                "model computes in float16, where gradients below 6e-8 become zero without a loss scale. Run the "
                "backward pass as `with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`. If "
                "you scale losses yourself, or need no loss scale, pass loss_scale=1.0 to amp.initialize.",
            )

    stepped = stepping


def warn_scaled_twice(window: Window, scaler: str) -> None:
    """Warn that both ``amp.scale_loss`` and another scaler scaled the loss."""
    _warn_once(
        window,
        "twice",
        f"The gradients of this step came through amp.scale_loss, and {scaler} also scales them: the loss is "
        "multiplied by two loss scales, and overflows early. Use only one: remove the GradScaler and call "
        "scaled_loss.backward() in the block and optimizer.step() after it, or pass loss_scale=1.0 to amp.initialize.",
    )


def warn_no_backward(window: Window, face: str) -> None:
    """Warn that user code left a block without a backward pass."""
    _warn_once(
        window,
        "without backward",
        f"The {face} block ended without a backward pass through its scaled loss. Gradients of a backward pass after "
        "the block are never divided by the loss scale, and gradients of a different loss in the block are divided by "
        f"a scale that never multiplied them. Write `with {face}(loss, optimizer) as scaled_loss: "
        "scaled_loss.backward()`.",
    )


def _warn_once(window: Window, kind: str, message: str) -> None:
    if kind not in _warned.setdefault(window, set()):
        _warned[window].add(kind)
        warnings.warn(message, UserWarning, stacklevel=callers_level())


def _torch_scaler() -> str | None:
    """Return the class name of the enabled torch GradScaler that called this step; None if no scaler called it."""
    frame = caller_in("torch.amp.grad_scaler")
    scaler = None if frame is None else frame.f_locals.get("self")
    return type(scaler).__name__ if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled() else None
