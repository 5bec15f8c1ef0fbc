"""One scaled backward pass, whoever asks for it: the order of calls between a loss scale and attached optimizers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NoReturn

import torch

from ..casting import scopes as ops
from ..casting.compiled import eager
from ..core.dtypes import is_half
from ..core.errors import ArgumentTypeError, UsageError
from ..distributed.ddp_sync import Pass
from ..gradients.loss_scaler import LossScaler
from .attached import AttachedOptimizer, settle

__all__ = ["ScaledBackward", "conclude"]


class _NotEntered(UsageError, AttributeError):  # noqa: N818 - what it says
    """A block was used as if it were the loss."""


class ScaledBackward:
    """A block: scale a loss; when it is left, unscale the gradients that its backward pass brought, and move the scale.

    Its value is the scaled loss.

    Args:
        loss: a floating tensor on any device; a 16-bit one is scaled in fp32.
        attached: the optimizers whose parameters get gradients.
        scaler: the loss scale.
        name: who asks, for the message of an error.
        found_inf: 0-dim float32 tensor, set to 1.0 if a new gradient holds inf or NaN. With None a static scale of
            1.0 neither scales nor looks.
        delay: leave the gradients scaled and the scale where it is.
        check: False moves no scale and skips no step for this pass.

    Raises:
        ArgumentTypeError: if the loss is no floating tensor.
        UsageError: from the block, if it was left with gradients that did not come through the scaled loss; they are
            dropped.
        LossScaleCollapsed: from the block, if the scale has been at its floor for too many overflows in a row.
    """

    def __init__(
        self,
        loss: torch.Tensor,
        attached: Sequence[AttachedOptimizer],
        scaler: LossScaler,
        *,
        name: str,
        found_inf: torch.Tensor | None = None,
        delay: bool = False,
        check: bool = True,
    ) -> None:
        if not isinstance(loss, torch.Tensor) or not loss.is_floating_point():
            kind = loss.dtype if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ArgumentTypeError(f"{name} needs a floating tensor as loss, not {kind}.")
        self._loss = loss
        self._attached = attached
        self._scaler = scaler
        self._name = name
        self._found_inf = found_inf
        self._delay = delay
        self._check = check
        self._scale: torch.Tensor | None = None
        self._watched: list[Any] = []  # hooks on the loss and the scaled loss
        self._passed: set[str] = set()  # which of them a backward pass has gone through

    def __getattr__(self, name: str) -> NoReturn:
        raise _NotEntered(
            f"{self._name} returns a block, which has no {name!r}: write `with {self._name}(loss, optimizer) as "
            "scaled_loss: scaled_loss.backward()`."
        )

    @eager
    def __enter__(self) -> torch.Tensor:
        loss = self._loss
        self._scale = scale = (
            None if self._found_inf is None and self._scaler.neutral else self._scaler.scale(loss.device)
        )
        seen: set[int] | None = None if len(self._attached) == 1 else set()  # alone nobody else has the same parameters
        begun: list[AttachedOptimizer] = []
        try:
            for one in self._attached:
                one.begin(scale, seen, delay=self._delay)
                begun.append(one)
        except BaseException:
            for one in begun:
                one.abandon()
            raise
        wide = loss.float() if is_half(loss) else loss
        if scale is None:
            return wide
        scaled = wide * scale
        if scaled.requires_grad:
            for name, tensor in (("loss", loss), ("scaled_loss", scaled)):
                self._watched.append(tensor.register_hook(functools.partial(self._note, name)))
        return scaled

    def _note(self, name: str, _: torch.Tensor) -> None:
        self._passed.add(name)

    @eager
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ops.clear_cache()
        astray = self._passed == {"loss"} and any(one.gradients.arrived() for one in self._attached)
        while self._watched:
            self._watched.pop().remove()
        if kind is not None or astray:
            for one in self._attached:
                one.abandon()
            if astray and kind is None:
                raise UsageError(
                    f"backward() was called on the loss given to {self._name}, and not on the scaled loss, so that its "
                    "gradients would be divided by a scale that they do not have. Call it on what the block gives: "
                    f"`with {self._name}(loss, optimizer) as scaled_loss: scaled_loss.backward()`. The gradients are "
                    "what they were before the block."
                )
            return
        scale, found_inf = self._scale, self._found_inf
        if found_inf is None:
            found_inf = torch.zeros((), device=self._loss.device)
        seen: set[int] | None = None if len(self._attached) == 1 else set()
        try:
            for one in self._attached:
                one.finish(scale, found_inf, seen, delay=self._delay)
        finally:
            for one in self._attached:
                if one.is_open:  # one before it was refused
                    one.abandon()
        if scale is not None and self._check and not self._delay:
            conclude(self._attached, self._scaler, found_inf)


def conclude(attached: Sequence[AttachedOptimizer], scaler: LossScaler, found_inf: torch.Tensor) -> None:
    """Let the next step of each optimizer and the loss scale know what a pass found.

    While other ranks do not have these gradients, nobody is told: the next pass that they average, or ``step``, does.
    Nor does a pass count that has brought no gradients: under FSDP2 without synchronization they come later.
    """
    if not any(one.brought for one in attached):
        return
    passed = Pass(found_inf, scaler, dynamic=scaler.dynamic)
    for one in attached:
        one.passes.append(passed)
    if not any(one.ranks.behind for one in attached):
        settle(attached)
