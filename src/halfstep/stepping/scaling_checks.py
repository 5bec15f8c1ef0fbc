"""Warnings about gradients that did not go through the loss scale as they should: one of each kind for an optimizer.

What is known at a step is whether any scaled pass has come, through a block or a ``GradScaler``. The rest is looked at
only where that is not so, or for the first few steps.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from ..core.callers import caller_in, callers_level
from ..core.dtypes import is_half
from ..gradients.async_reader import AsyncReader, capturing
from ..gradients.loss_scaler import DeviceLossScaler
from ..kernels import multi_tensor

__all__ = ["ScalingChecks"]

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


class ScalingChecks:
    """The state of these warnings for one optimizer.

    Attributes:
        expected: the loss scales that a face has set up for the optimizer; empty if it scales no losses.
        in_float16: whether gradients are computed in float16, where small ones become zero without a loss scale.
        scaled: whether a scaled backward pass has ever come. Later ones may be replays of a CUDA graph, without a call.
        judged: what ``scaled`` was when ``at_step`` had nothing more to look for; None before that.
    """

    def __init__(self) -> None:
        self.expected: Sequence[DeviceLossScaler] = ()
        self.in_float16 = False
        self.scaled = False
        self.judged: bool | None = None
        self._said: set[str] = set()
        self._looks = _LOOKS
        self._reader: AsyncReader | None = None
        self._seen: tuple[float, float] | None = None  # the norm and the largest value at the last look

    def at_step(self, optimizer: torch.optim.Optimizer, *, released: bool) -> None:
        """Look at the gradients that a step is about to use, or that the closure of a step has left.

        A step whose learning rates are all zero uses none. So does ``torch.distributed.checkpoint`` make state.

        Args:
            optimizer: whose step it is.
            released: whether parameters have stepped already, inside of backward passes.
        """
        name, groups = type(optimizer).__name__, optimizer.param_groups
        if not self.scaled and not released and all(p.grad is None for group in groups for p in group["params"]):
            return
        scaler = _torch_scaler()
        if self.scaled:
            self.judged = True
            if scaler is not None:
                self.say_twice(f"torch's {scaler}")
        elif scaler is not None:
            self.judged = False  # this scaler does it instead, and on purpose
        elif self.in_float16 and any(group.get("lr") != 0.0 for group in groups):
            self.judged = False
            self._say(
                "forgotten",
                f"{name}.step() uses gradients that came through no block of amp.scale_loss, and this model computes "
                "in float16, where gradients below 6e-8 become zero without a loss scale. Run the backward pass as "
                "`with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`. If you scale losses "
                "yourself, or need no scale, say so: amp.initialize(..., loss_scale=1.0).",
            )

    def say_twice(self, scaler: str) -> None:
        """Warn of a loss that a scaler has scaled, too."""
        self._say(
            "twice",
            f"The gradients of this step came through a block of amp.scale_loss, and {scaler} scales them, too: the "
            "loss is multiplied by two loss scales, and overflows early. Use one of them: drop the GradScaler and call "
            "loss.backward() in the block and optimizer.step() after it, or give loss_scale=1.0 to amp.initialize.",
        )

    def say_without_backward(self, face: str) -> None:
        """Warn of a block that is left without a backward pass."""
        self._say(
            "without backward",
            f"The block of {face} was left, and no backward pass had gone through its scaled loss. Gradients of a "
            "backward pass after the block are never divided by the loss scale, and those of another loss inside it "
            f"are divided by a scale that they do not have. Write `with {face}(loss, optimizer) as scaled_loss: "
            "scaled_loss.backward()`.",
        )

    def look_for_clipping(self, params: Sequence[torch.Tensor], scale: torch.Tensor, *, plain: bool) -> None:
        """Look whether gradients that are about to be unscaled were clipped; the first few times that it may be so.

        Clipping writes into gradients that a backward pass has brought. Gradients that were written into are looked at:
        a clip leaves the same norm, or the same largest value, at one step after the other.

        Args:
            params: those of the optimizer.
            scale: 0-dim tensor that their gradients are multiplied by.
            plain: True if no block, but a ``GradScaler`` unscales them.
        """
        self.scaled = True
        if self._reader is not None:
            self._judge(plain=plain)
        if not self._looks:
            return
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
        self._judge(plain=plain)

    def _judge(self, *, plain: bool) -> None:
        assert self._reader is not None
        for norm, largest, half, scale in self._reader.poll():
            before, self._seen = self._seen, (norm, largest)
            tolerance = 2e-3 if half else 1e-5  # torch's clip_grad_norm_ rounds the norm of 16-bit gradients
            same = [n for n, old in zip(self._seen, before or (), strict=False) if abs(n - old) <= tolerance * n]
            if not same or not 0.0 < same[0] <= _LARGEST_CLIP or scale < _SMALLEST_SCALE:
                continue
            what = "norm" if same[0] == norm else "largest value"
            self._say(
                "clipped",
                f"It looks as if gradients were clipped while they were still multiplied by the loss scale of "
                f"{scale:g}: their {what} was {same[0]:.3g} again, so {same[0] / scale:.3g} is left to step with. "
                f"{_UNSCALE_BEFORE if plain else _CLIP_AFTER}",
            )

    def _say(self, kind: str, message: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            warnings.warn(message, UserWarning, stacklevel=callers_level())


def _torch_scaler() -> str | None:
    """The class of the enabled GradScaler of torch that calls this step; None if none does."""
    frame = caller_in("torch.amp.grad_scaler")
    scaler = None if frame is None else frame.f_locals.get("self")
    return type(scaler).__name__ if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled() else None
