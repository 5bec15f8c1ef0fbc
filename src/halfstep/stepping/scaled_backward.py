"""The block in which a face runs one scaled backward pass: what is behind ``scale_loss`` and its like.

It calls the windows of all its optimizers in order (``backward.py``) and then moves the loss scale.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NoReturn

import torch

from ..casting.dynamo import eager
from ..core.dtypes import HALF_DTYPES
from ..core.errors import ArgumentTypeError, UsageError
from ..core.text import counted
from ..parameters.loss_scaler import DeviceLossScaler
from .backward import WINDOWS, Window, WindowState, reachable, record_pass
from .scaling_checks import say_without_backward

__all__ = ["ScaledBackward", "before_unscaling", "check_loss"]

before_unscaling: list[Callable[[], None]] = []
"""Functions that are called before gradients are unscaled and scales move. One that raises leaves both as they were
before the block."""


def check_loss(name: str, loss: object) -> None:
    """Check that a loss can be scaled; ``name`` is who asks.

    Raises:
        ArgumentTypeError: if it is no floating tensor.
    """
    if not isinstance(loss, torch.Tensor) or not loss.is_floating_point():
        kind = loss.dtype if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ArgumentTypeError(f"{name} needs a floating tensor as loss, not {kind}.")


class _NotEntered(UsageError, AttributeError):  # noqa: N818 - an AttributeError too, so that hasattr() works
    """A block was used as if it were the loss."""


class ScaledBackward:
    """A block that gives the scaled loss. On leaving it, the new gradients are unscaled and the loss scale is updated.

    Args:
        loss: a floating tensor on any device; a 16-bit one is scaled in fp32.
        windows: the windows of the optimizers whose parameters get gradients.
        scaler: the loss scale.
        name: the name of the caller, for the message of an error.
        found_inf: 0-dim float32 tensor, set to 1.0 if a new gradient holds inf or NaN. With None a static scale of
            1.0 neither scales nor looks for inf and NaN.
        stay: True if the next pass adds to the gradients in place.
        check: False moves no scale and skips no step for this pass.

    Raises:
        ArgumentTypeError: if the loss is no floating tensor.
        UsageError: from the block, if it was left with gradients that did not come through the scaled loss; they are
            dropped. Or if a hook of the user changed the dtype of a gradient.
        LossScaleCollapsed: from the block, if the scale has been at its floor for too many overflows in a row.
    """

    def __init__(
        self,
        loss: torch.Tensor,
        windows: Sequence[Window],
        scaler: DeviceLossScaler,
        *,
        name: str,
        found_inf: torch.Tensor | None = None,
        stay: bool = False,
        check: bool = True,
    ) -> None:
        check_loss(name, loss)
        self.loss = loss
        self._windows = windows
        self._scaler = scaler
        self._name = name
        self._found_inf = found_inf
        self._stay = stay
        self._check = check
        # Of further optimizers, whose parameters the pass may reach, with their states before.
        self._beside: dict[Window, WindowState] = {}
        self._scale: torch.Tensor | None = None
        self._hooks: list[Any] = []  # on the loss and the scaled loss
        self._reached: set[str] = set()  # which of the two a backward pass has gone through

    def __getattr__(self, name: str) -> NoReturn:
        raise _NotEntered(
            f"{self._name} returns a block, which has no {name!r}: write `with {self._name}(loss, optimizer) as "
            "scaled_loss: scaled_loss.backward()`."
        )

    def __repr__(self) -> str:
        return f"<{self._name} block for {counted(len(self._windows), 'optimizer')}, {self._scaler.name}>"

    @eager
    def __enter__(self) -> torch.Tensor:
        loss = self.loss
        guard = functools.partial(_refuse_unscaled, self._reached, self._name)
        try:
            scales = self._found_inf is not None or not self._scaler.neutral
            self._scale = scale = self._scaler.scale(loss.device) if scales else None
            for window in self._windows:
                if self._stay and window.release is not None:
                    window.release.refuse_delay()
                window.begin(scale, block=self, guard=guard)
            for window in [] if scale is None or len(WINDOWS) <= len(self._windows) else reachable(self._windows):
                # `begin` clears what a skipped step has left, so that no later pass clears again.
                self._beside[window] = WindowState.IDLE if window.state is WindowState.DIRTY else window.state
                window.begin(scale, block=self, guard=_refuse_release, named=False)
            wide = loss.float() if loss.dtype in HALF_DTYPES else loss
            if scale is None:
                return wide
            scaled = wide * scale
            if scaled.requires_grad:
                for name, tensor in (("loss", loss), ("scaled_loss", scaled)):
                    self._hooks.append(tensor.register_hook(functools.partial(_note, self._reached, name)))
            return scaled
        except BaseException:
            self._abandon()
            raise

    @eager
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._close()
            else:
                self._abandon()
                if isinstance(error, RuntimeError) and "has changed the type of value" in str(error):
                    raise UsageError(
                        "A backward hook returned a gradient in another dtype than it was given, and torch refuses it. "
                        "At O2 and O3 gradients of activations are 16-bit: return each with .to() in the dtype given."
                    ) from error
        except BaseException:
            self._abandon()
            raise

    def _close(self) -> None:
        unscaled_loss = self._reached == {"loss"} and any(window.keeper.gradients.arrived() for window in self._windows)
        missed = bool(self._hooks) and not self._reached
        while self._hooks:
            self._hooks.pop().remove()
        if unscaled_loss:
            _refuse_unscaled(self._reached, self._name)
        if missed:
            say_without_backward(self._windows[0], self._name)
        for callback in before_unscaling:
            callback()
        found_inf = self._found_inf
        if found_inf is None:
            found_inf = torch.zeros((), dtype=torch.float32, device=self.loss.device)
        # A pass without gradients does not count: under FSDP2 without synchronization they come later.
        found = [window.finish(self._scale, found_inf, self._scaler) for window in self._windows]
        for window in list(self._beside):
            self.finish_reached(window)
        if self._scale is not None and self._check and any(found):
            record_pass(self._windows, found_inf, self._scaler, moves=self._scaler)
        else:
            for window in self._windows:
                window.close()
        if self._stay:
            for window in self._windows:
                window.state = WindowState.SCALED

    def finish_reached(self, window: Window) -> None:
        """End the pass for one of the optimizers that this block does not name."""
        assert self._scale is not None
        window.finish_reached(self._scaler, self._scale, self._beside.pop(window))

    def _abandon(self) -> None:
        """Put back the gradients from before, of each optimizer that this block is open for."""
        while self._hooks:
            self._hooks.pop().remove()
        for window in (*self._windows, *self._beside):
            if window.block is self:
                window.abandon()


# These hang on tensors and on the optimizer. They must not hold the block, which is to be gone when its `with` is.


def _note(reached: set[str], name: str, _: torch.Tensor) -> None:
    reached.add(name)


def _refuse_unscaled(reached: set[str], face: str) -> None:
    """Refuse a backward pass that did not come through the scaled loss."""
    if reached == {"loss"}:
        raise UsageError(
            f"backward() was called on the loss given to {face}, and not on the scaled loss, so that its gradients "
            "would be divided by a scale that they do not have. Call it on what the block gives: "
            f"`with {face}(loss, optimizer) as scaled_loss: scaled_loss.backward()`. The gradients are what they were "
            "before the block."
        )


def _refuse_release() -> None:
    """Refuse a pass that reaches parameters which step inside of backward passes, in a block of another optimizer."""
    raise UsageError(
        "The backward pass in this block reaches parameters that step inside of backward passes (attach), and their "
        "optimizer is not one of the block. Name all optimizers: amp.scale_loss(loss, [first, second])."
    )
