"""Warnings about gradients that did not go through the loss scale as they should: one of each kind for an optimizer.

What is known at a step is whether any scaled pass has come, through a block or a ``GradScaler``. The rest is looked at
only where that is not so, or for the first few passes: these are subscribers of a window, which leave it then.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch

from ..core.callers import caller_in, callers_level
from ..core.dtypes import is_half
from ..gradients.async_reader import AsyncReader, capturing
from ..gradients.loss_scaler import DeviceLossScaler
from ..kernels import multi_tensor
from .backward import Subscriber, Window

__all__ = ["ClippedGradients", "ForgottenScale", "say_twice", "say_without_backward"]

_CLIP_AFTER = (
    "Clip after the block, where they are unscaled: torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), ...)."
)
_UNSCALE_BEFORE = (
    "Call scaler.unscale_(optimizer) before you clip, or scaler.clip_grad_norm_(optimizer, max_norm), which does both."
)

_LARGEST_CLIP = 100.0
"""Nobody clips to more. Gradients that are multiplied by a loss scale are smaller only if they vanish."""
_SMALLEST_SCALE = 256.0
_LOOKS = 5
_STEPS = 3
"""How many steps are waited for: the first for a write into gradients, the last for norms to reach the host."""


_said: WeakKeyDictionary[Window, set[str]] = WeakKeyDictionary()
"""The kinds of warnings that the optimizer of a window has had."""


class ForgottenScale(Subscriber):
    """Looks at steps of an optimizer until one uses gradients that have come through its loss scale, or should have.

    Args:
        expected: the loss scales that a face has set up for the optimizer.
        in_float16: True if gradients are computed in float16, where small ones become zero without a loss scale.
    """

    def __init__(self, expected: Sequence[DeviceLossScaler], in_float16: bool) -> None:
        self._expected = expected
        self._in_float16 = in_float16
        self._scaled = False  # whether a scaled pass has ever come; later ones may be replays of a CUDA graph

    def closed(self, window: Window, scaler: DeviceLossScaler, scale: torch.Tensor, *, by: str) -> None:
        """Learn that the optimizer has a scaled pass."""
        self._scaled = True

    def stepping(self, window: Window) -> None:
        """Look at the gradients that a step is about to use, or that the closure of a step has left.

        A step whose learning rates are all zero uses none. So does ``torch.distributed.checkpoint`` make state.
        """
        optimizer, release, groups = window.keeper.optimizer, window.release, window.keeper.optimizer.param_groups
        neutral = all(scaler.neutral for scaler in self._expected)
        used = neutral or self._scaled or (release is not None and release.has_stepped)
        if window.block is not None or not (used or any(p.grad is not None for g in groups for p in g["params"])):
            return
        scaler = _torch_scaler()
        if not (neutral or self._scaled or scaler) and all(group.get("lr") == 0.0 for group in groups):
            return
        window.subscribers.remove(self)
        if self._scaled and scaler is not None and not neutral:
            say_twice(window, f"torch's {scaler}")
        elif self._in_float16 and not (neutral or self._scaled or scaler):  # a scaler may do it instead, on purpose
            _say(
                window,
                "forgotten",
                f"{type(optimizer).__name__}.step() uses gradients that came through no block of amp.scale_loss, and "
                "this model computes in float16, where gradients below 6e-8 become zero without a loss scale. Run the "
                "backward pass as `with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`. If "
                "you scale losses yourself, or need no scale, say so: amp.initialize(..., loss_scale=1.0).",
            )

    stepped = stepping


class ClippedGradients(Subscriber):
    """Looks whether gradients were clipped before they are unscaled; the first few times that it may be so.

    Clipping writes into gradients that a backward pass has brought. Gradients that were written into are looked at: a
    clip leaves the same norm, or the same largest value, at one step after the other. Where nothing was written in the
    first steps, nothing is looked at any more.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._looks = _LOOKS
        self._reader: AsyncReader | None = None
        self._seen: tuple[float, float] | None = None  # the norm and the largest value at the last look

    def closed(self, window: Window, scaler: DeviceLossScaler, scale: torch.Tensor, *, by: str) -> None:
        """Look at the gradients of a pass."""
        if by != "clipping" and self.look(window.keeper.table.params, scale, by=by):
            window.subscribers.remove(self)

    def stepped(self, window: Window) -> None:
        """Leave after the first steps, also where nothing is scaled."""
        self._steps += 1
        if self._steps >= (_STEPS if self._reader is None else _STEPS + _LOOKS):
            window.subscribers.remove(self)

    def look(self, params: Sequence[torch.Tensor], scale: torch.Tensor, *, by: str) -> bool:
        """Look at the gradients if they were written into, and compare them with the gradients of passes before.

        Args:
            params: the parameters of the optimizer.
            scale: 0-dim tensor that their gradients are multiplied by.
            by: what unscales them; see ``Subscriber.closed``.

        Returns:
            True if that gave the warning, which there is once.
        """
        if self._looks:
            self._post(params, scale)
        return self._reader is not None and self._judge(by)

    def _post(self, params: Sequence[torch.Tensor], scale: torch.Tensor) -> None:
        first = next((grad for param in params if (grad := param.grad) is not None), None)
        if first is None or first._version == 0 or type(first) is not torch.Tensor or capturing(first.device):
            return
        grads = [g for param in params if (g := param.grad) is not None]
        if any(g.is_sparse or g.is_complex() or g.device != first.device or type(g) is not torch.Tensor for g in grads):
            return
        self._looks -= 1
        norm = multi_tensor.norm(grads).to(torch.float32)
        largest = multi_tensor.norm(grads, float("inf")).to(torch.float32)
        half = torch.full_like(norm, float(any(map(is_half, grads))))
        self._reader = self._reader or AsyncReader(4)
        self._reader.post(norm, largest, half, scale.to(norm.device, torch.float32, non_blocking=True))

    def _judge(self, by: str) -> bool:
        """Compare the norms that have been read by now. Returns True if that gave a warning."""
        assert self._reader is not None
        for norm, largest, half, scale in self._reader.poll():
            before, self._seen = self._seen, (norm, largest)
            tolerance = 2e-3 if half else 1e-5  # torch's clip_grad_norm_ rounds the norm of 16-bit gradients
            same = [n for n, old in zip(self._seen, before or (), strict=False) if abs(n - old) <= tolerance * n]
            if not same or not 0.0 < same[0] <= _LARGEST_CLIP or scale < _SMALLEST_SCALE:
                continue
            what = "norm" if same[0] == norm else "largest value"
            self._looks, self._reader = 0, None
            warnings.warn(
                f"It looks as if gradients were clipped while they were still multiplied by the loss scale of "
                f"{scale:g}: their {what} was {same[0]:.3g} again, so {same[0] / scale:.3g} is left to step with. "
                f"{_CLIP_AFTER if by == 'block' else _UNSCALE_BEFORE}",
                UserWarning,
                stacklevel=callers_level(),
            )
            return True
        return False


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
