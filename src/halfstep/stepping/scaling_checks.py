"""Warnings about gradients that did not go through the loss scale as they should: one of each kind for an optimizer.

What is known at a step is whether any scaled pass has come, through a block or a ``GradScaler``. The rest is looked at
only where that is not so, by a subscriber of the window, which leaves it then.
"""

from __future__ import annotations

import warnings
from weakref import WeakKeyDictionary

import torch

from ..parameters.loss_scaler import DeviceLossScaler
from ..torch_internals.callers import caller_in, callers_level
from .backward import Subscriber, Window

__all__ = ["ForgottenScale", "say_twice", "say_without_backward"]

_said: WeakKeyDictionary[Window, set[str]] = WeakKeyDictionary()
"""The kinds of warnings that the optimizer of a window has had."""


class ForgottenScale(Subscriber):
    """Looks at steps of an optimizer until one uses gradients that have come through its loss scale.

    It is for optimizers for which a face has set up a loss scale.

    Args:
        in_float16: True if gradients are computed in float16, where small ones become zero without a loss scale.
    """

    def __init__(self, in_float16: bool) -> None:
        self._in_float16 = in_float16
        self._scaled = False  # whether a scaled pass has ever come; later ones may be replays of a CUDA graph
        self._judged = False  # whether a step has been judged; of unscaled gradients once, and once of scaled ones

    def closed(self, window: Window, scaler: DeviceLossScaler, scale: torch.Tensor) -> None:
        """Learn that the optimizer has a scaled pass."""
        self._scaled = True

    def stepping(self, window: Window) -> None:
        """Look at the gradients that a step is about to use, or that the closure of a step has left.

        A step whose learning rates are all zero uses none. So does ``torch.distributed.checkpoint`` make state.
        """
        optimizer, release, groups = window.keeper.optimizer, window.release, window.keeper.optimizer.param_groups
        used = self._scaled or (release is not None and release.has_stepped)
        used = used or any(p.grad is not None for group in groups for p in group["params"])
        if window.block is not None or not used or (self._judged and not self._scaled):
            return
        scaler = _torch_scaler()
        if self._scaled:
            window.subscribers.remove(self)
            if scaler is not None:
                say_twice(window, f"torch's {scaler}")
        elif scaler is not None:
            self._judged = True  # this scaler does it instead, and on purpose
        elif self._in_float16 and any(group.get("lr") != 0.0 for group in groups):
            self._judged = True
            _say(
                window,
                "forgotten",
                f"{type(optimizer).__name__}.step() uses gradients that came through no block of amp.scale_loss, and "
                "this model computes in float16, where gradients below 6e-8 become zero without a loss scale. Run the "
                "backward pass as `with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`. If "
                "you scale losses yourself, or need no scale, say so: amp.initialize(..., loss_scale=1.0).",
            )

    stepped = stepping


def say_twice(window: Window, scaler: str) -> None:
    """Warn of a loss that a scaler has scaled, too."""
    _say(
        window,
        "twice",
        f"The gradients of this step came through a block of amp.scale_loss, and {scaler} scales them, too: the "
        "loss is multiplied by two loss scales, and overflows early. Use one of them: drop the GradScaler and call "
        "loss.backward() in the block and optimizer.step() after it, or give loss_scale=1.0 to amp.initialize.",
    )


def say_without_backward(window: Window, face: str) -> None:
    """Warn of a block that is left without a backward pass."""
    _say(
        window,
        "without backward",
        f"The block of {face} was left, and no backward pass had gone through its scaled loss. Gradients of a "
        "backward pass after the block are never divided by the loss scale, and those of another loss inside it "
        f"are divided by a scale that they do not have. Write `with {face}(loss, optimizer) as scaled_loss: "
        "scaled_loss.backward()`.",
    )


def _say(window: Window, kind: str, message: str) -> None:
    if kind not in _said.setdefault(window, set()):
        _said[window].add(kind)
        warnings.warn(message, UserWarning, stacklevel=callers_level())


def _torch_scaler() -> str | None:
    """The class of the enabled GradScaler of torch that calls this step; None if none does."""
    frame = caller_in("torch.amp.grad_scaler")
    scaler = None if frame is None else frame.f_locals.get("self")
    return type(scaler).__name__ if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled() else None
