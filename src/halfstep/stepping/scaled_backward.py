"""The block in which a face runs one scaled backward pass, such as ``scale_loss``.

The block opens and closes the windows of its optimizers in order (``backward.py``), then updates the loss scale.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from types import TracebackType
from typing import Any, NoReturn

import torch

from ..casting.dynamo import eager
from ..core.dtypes import HALF_DTYPES
from ..core.errors import ArgumentTypeError, UsageError
from ..core.text import counted
from ..parameters.loss_scaler import DeviceLossScaler
from ..torch_internals.torch_compat import DisableTorchFunction
from .backward import WINDOWS, Window, WindowState, reachable, record_pass
from .scaling_checks import warn_no_backward

__all__ = ["ScaledBackward", "before_unscaling", "check_loss"]

before_unscaling: list[Callable[[], None]] = []
"""Functions that each block calls before it unscales gradients and updates the loss scale. If a function raises, both
stay as they were before the block."""


def check_loss(name: str, loss: object) -> None:
    """Check that a loss can be scaled, on behalf of the function ``name``.

    Raises:
        ArgumentTypeError: if the loss is not a floating-point tensor.
    """
    if not isinstance(loss, torch.Tensor) or not loss.is_floating_point():
        kind = loss.dtype if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ArgumentTypeError(f"{name} needs a floating-point tensor as loss, not {kind}.")


class _NotEntered(UsageError, AttributeError):  # noqa: N818 - an AttributeError so that hasattr() works
    """Raised if user code uses a block as if it were the loss."""


@dataclass(eq=False)
class ScaledBackward:
    """A context manager that returns the scaled loss; on exit it unscales the new gradients and updates the loss scale.

    Args:
        loss: a floating-point tensor on any device; a 16-bit loss is scaled in fp32.
        windows: the windows of the optimizers that the block names.
        scaler: the loss scaler.
        name: the name of the caller, for error messages.
        found_inf: 0-dim float32 tensor, set to 1.0 if a new gradient holds inf or NaN. If None, a static scale of 1.0
            neither scales the loss nor checks the gradients.
        delay: True if the next pass accumulates into ``p.grad`` in place.
        check: False to ignore an overflow of this pass: no loss scale changes, and no step is skipped.

    Raises:
        ArgumentTypeError: if the loss is not a floating-point tensor.
        UsageError: on exit, if gradients did not come through the scaled loss (they are dropped), or if a user's hook
            changed the dtype of a gradient.
        LossScaleCollapsed: on exit, if the scale was at its floor for too many overflows in a row.
    """

    loss: torch.Tensor
    windows: Sequence[Window]
    scaler: DeviceLossScaler
    _: KW_ONLY
    name: str = "scale_loss"
    found_inf: torch.Tensor | None = None
    delay: bool = False
    check: bool = True
    # Windows that the block does not name but the pass may reach, with their states before the block.
    _unnamed: dict[Window, WindowState] = field(default_factory=dict, init=False)
    _scale: torch.Tensor | None = field(default=None, init=False)
    _hooks: list[Any] = field(default_factory=list, init=False)  # handles of the hooks on "loss" and "scaled_loss"
    _reached: set[str] = field(default_factory=set, init=False)  # the names of the two that a pass went through

    def __post_init__(self) -> None:
        check_loss(self.name, self.loss)

    def __getattr__(self, name: str) -> NoReturn:
        raise _NotEntered(
            f"{self.name} returns a context manager, which has no {name!r}: write `with {self.name}(loss, optimizer) "
            "as scaled_loss: scaled_loss.backward()`."
        )

    def __repr__(self) -> str:
        return f"<{self.name} block for {counted(len(self.windows), 'optimizer')}, {self.scaler.name}>"

    @eager
    def __enter__(self) -> torch.Tensor:
        loss = self.loss
        guard = functools.partial(_refuse_unscaled, self._reached, self.name)
        try:
            scales = self.found_inf is not None or not self.scaler.neutral
            self._scale = scale = self.scaler.scale(loss.device) if scales else None
            wide = loss.float() if loss.dtype in HALF_DTYPES else loss
            scaled = wide if scale is None else wide * scale
            with DisableTorchFunction():  # otherwise modes, such as the casts of O1, see each access of an attribute
                for window in self.windows:
                    if self.delay and window.release is not None:
                        window.release.refuse_delay()
                    window.begin(scale, block=self, guard=guard)
                for window in [] if scale is None or len(WINDOWS) <= len(self.windows) else reachable(self.windows):
                    # `begin` clears the gradients of a skipped step, so that the state after the pass is not DIRTY.
                    self._unnamed[window] = WindowState.IDLE if window.state is WindowState.DIRTY else window.state
                    window.begin(scale, block=self, guard=_refuse_release, named=False)
                if scale is not None and scaled.requires_grad:
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
                with DisableTorchFunction():  # as in `__enter__`
                    self._close()
            else:
                self._abandon()
                if isinstance(error, RuntimeError) and "has changed the type of value" in str(error):
                    raise UsageError(
                        "A backward hook returned a gradient in another dtype than its argument, and torch refuses it. "
                        "At O2 and O3 gradients of activations are 16-bit: convert the result with .to(grad.dtype)."
                    ) from error
        except BaseException:
            self._abandon()
            raise

    def _close(self) -> None:
        if self._reached == {"loss"} and any(window.gradients.arrived() for window in self.windows):
            _refuse_unscaled(self._reached, self.name)
        if self._hooks and not self._reached:
            warn_no_backward(self.windows[0], self.name)
        while self._hooks:
            self._hooks.pop().remove()
        for callback in before_unscaling:
            callback()
        found_inf = self.found_inf
        if found_inf is None:
            found_inf = torch.zeros((), dtype=torch.float32, device=self.loss.device)
        # A pass without gradients is not recorded: under FSDP2 without synchronization they arrive in a later pass.
        found = [window.finish(self._scale, found_inf, self.scaler) for window in self.windows]
        for window in list(self._unnamed):
            self.finish_reached(window)
        if self._scale is not None and self.check and any(found):
            record_pass(self.windows, found_inf, self.scaler, scaler=self.scaler)
        else:
            for window in self.windows:
                window.close()
        if self.delay:
            for window in self.windows:
                window.state = WindowState.SCALED

    def finish_reached(self, window: Window) -> None:
        """End the pass for an optimizer that this block does not name."""
        assert self._scale is not None
        window.finish_reached(self.scaler, self._scale, self._unnamed.pop(window))

    def _abandon(self) -> None:
        """Put back the set-aside gradients of each optimizer whose window this block still has open."""
        while self._hooks:
            self._hooks.pop().remove()
        for window in (*self.windows, *self._unnamed):
            if window.block is self:
                window.abandon()


# Tensors and gradient release keep references to the functions below. The functions must not refer to the block,
# because a window recognizes an interrupted block by its dead weak reference (``Window.is_open``).


def _note(reached: set[str], name: str, _: torch.Tensor) -> None:
    reached.add(name)


def _refuse_unscaled(reached: set[str], face: str) -> None:
    """Refuse the gradients if the backward pass began at the loss instead of the scaled loss."""
    if reached == {"loss"}:
        raise UsageError(
            f"backward() was called on the loss given to {face} instead of the scaled loss, so its gradients would be "
            "divided by a scale that never multiplied them. Call backward() on the scaled loss: "
            f"`with {face}(loss, optimizer) as scaled_loss: scaled_loss.backward()`. The gradients are unchanged from "
            "before the block."
        )


def _refuse_release() -> None:
    """Refuse a pass that reaches parameters with gradient release, in a block that does not name their optimizer."""
    raise UsageError(
        "The backward pass in this block reaches parameters that step during backward passes (attach), but the block "
        "does not name their optimizer. Name all optimizers: amp.scale_loss(loss, [first, second])."
    )
