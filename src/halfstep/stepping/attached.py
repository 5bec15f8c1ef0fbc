"""What halfstep keeps about one torch optimizer, and how its step is taken or skipped.

``attach`` gives the optimizer a class of its own, made on the fly below the one it has, whose ``step``, ``zero_grad``,
``add_param_group`` and ``load_state_dict`` come here. Nothing is put on the instance but ``_amp_stash``, and everybody
else meets an ordinary optimizer: its groups hold the model's parameters, its state is keyed by them. Faces drive it:
``begin`` before a scaled backward pass, ``finish`` after it; the next ``step`` is skipped if a pass overflowed.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch

from ..casting import scopes as ops
from ..core.dtypes import halves
from ..core.errors import UsageError
from ..distributed.ddp_sync import Pass, Ranks, agree, any_overflow
from ..gradients.loss_scaler import LossScaler
from ..masters.keeper import MasterKeeper
from ..optimizers._rows import SparseGradient
from ..optimizers.fuse import OfTorch, unfuse
from .closure import ClosureOverflowed, guarded
from .diagnosis import first_bad_gradient, refuse_strays
from .dynamic_class import dress, undress
from .observers import observers
from .step import Stepping

__all__ = ["AttachedOptimizer", "attach", "attached_to", "settle"]

logger = logging.getLogger("halfstep")


def attached_to(optimizer: object) -> AttachedOptimizer | None:
    """What is kept about an optimizer, or about the one behind a wrapper; None if it is not attached.

    It lies where Apex kept its own: scripts ask for ``_amp_stash`` to learn whether amp is on.
    """
    found = getattr(optimizer, "_amp_stash", None)
    return found if isinstance(found, AttachedOptimizer) else None


def attach(optimizer: torch.optim.Optimizer, **options: Any) -> AttachedOptimizer:
    """Take over the step of an optimizer; the options are those of ``AttachedOptimizer``.

    Raises:
        UsageError: if it is attached already.
    """
    if attached_to(optimizer) is not None:
        raise UsageError(
            f"This {type(optimizer).__name__} has been through amp.initialize, amp.decorate, FP16_Optimizer or "
            "amp.init once and can go only once; make a new optimizer to start over."
        )
    attached = AttachedOptimizer(optimizer, **options)
    dress(optimizer, attached)
    return attached


class AttachedOptimizer:
    """The gradients, the masters and the step of one optimizer.

    Without ``attach`` it serves whoever calls its ``step`` instead of the optimizer's.

    Args:
        optimizer: any; this must not outlive it.
        masters, copies, originals, own: see ``MasterKeeper``.
        verbose: whether to log what is skipped.

    Attributes:
        keeper: its masters, whoever keeps them.
        gradients: see there.
        stepping: how it steps.
        ranks: what it knows about other processes.
        passes: the scaled backward passes since the last step.
        session: whoever attached it may leave its own state here.
        models: weak references to the models it trains, for whoever attached it to fill.
        brought: whether the latest backward pass left a gradient.
        is_open: whether a block is open.
        delayed: whether the gradients of delayed passes are still scaled.
        delayed_scale: by what; None if by nothing.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        masters: bool | Literal["elsewhere"] = False,
        copies: torch.dtype | None = None,
        originals: dict[int, torch.Tensor] | None = None,
        own: bool = True,
        verbose: bool = True,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.keeper = MasterKeeper(optimizer, masters, copies, originals, own=own)
        self.gradients = self.keeper.gradients
        self.stepping = Stepping(optimizer)
        self.ranks = Ranks()
        self.passes: list[Pass] = []
        self.session: Any = None
        self.models: tuple[weakref.ref[torch.nn.Module], ...] = ()
        self.verbose = verbose
        self.brought = False
        self.is_open = False
        self.delayed = False
        self.delayed_scale: torch.Tensor | None = None

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, which this must not outlive."""
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    @property
    def device(self) -> torch.device:
        """Where the first parameter lives: flags and scales are kept there."""
        return next((param.device for param in self.params()), torch.device("cpu"))

    def params(self) -> list[torch.Tensor]:
        """The parameters in the optimizer's groups."""
        return self.keeper.listed()

    # ---- around a backward pass

    def begin(self, scale: torch.Tensor | None, seen: set[int] | None, *, delay: bool = False) -> None:
        """Set aside what gradients there are, so that a backward pass scaled by ``scale`` brings only its own.

        Those of delayed passes at the same scale stay, and the pass adds to them.

        Args:
            scale: the 0-dim tensor the loss is multiplied by; None if it is not scaled.
            delay: whether the pass is a delayed one.
            seen: identities of parameters already set aside for this pass by another optimizer; extended. None if
                there is no other.

        Raises:
            UsageError: if a block is open already.
        """
        if self.is_open:
            raise UsageError(
                f"A scale_loss block of this {type(self.optimizer).__name__} is open already, and two backward passes "
                "at two scales would mix. Close the first block before the second; gradients add up across blocks."
            )
        params = self.params()
        carried = None
        if not self.ranks.alone:
            self._look(params)
            scale, carried = self.ranks.gradient_scale(scale), self.ranks.carried
        if self.passes and not self.ranks.reductions and all(param.grad is None for param in params):
            self.passes = [passed for passed in self.passes if passed.scaler is None]  # of gradients that are gone
        if self.delayed and (scale is not self.delayed_scale or self.ranks.syncing):
            self._unscale_delayed()
        if not self.delayed:
            self.gradients.begin(params, scale, seen, carried, delay=delay)
        if not self.ranks.alone:
            self.ranks.watch(scale, params, self.gradients.held)
        self.is_open = True

    def abandon(self) -> None:
        """After ``begin``, when the backward pass failed: drop what it brought and put back what was set aside.

        If gradients went to other ranks, or were added to those of delayed passes, there is no way back: the next step
        is skipped.
        """
        self.is_open = False
        lost = self.ranks.abandon(self.params()) or self.delayed
        self.delayed = False
        self.gradients.restore()
        if lost:
            self.passes.append(Pass(torch.ones((), device=self.device), None))

    def finish(
        self, scale: torch.Tensor | None, found_inf: torch.Tensor, seen: set[int] | None, *, delay: bool = False
    ) -> None:
        """After ``begin`` and the backward pass: unscale what it brought and add what was set aside.

        Args:
            scale: as given to ``begin``.
            found_inf: 0-dim float32 tensor, set to 1.0 if a new gradient holds inf or NaN.
            seen: likewise, but of those served already.
            delay: leave the gradients scaled for now; the next undelayed pass, or ``step``, unscales all of them.
        """
        self.is_open = False
        params = self.params()
        self.brought = any(param.grad is not None for param in params)
        if self.ranks.reductions:
            self.ranks.close(params)
        if not self.brought:
            refuse_strays(params, self.models, type(self.optimizer).__name__)
        scale = self.ranks.gradient_scale(scale)
        self.delayed, self.delayed_scale = delay, scale
        if not delay:
            self.gradients.finish(params, scale, found_inf, seen)

    def _unscale_delayed(self) -> None:
        """Unscale what delayed passes left, by the scale they had; their overflow counts for the next step."""
        self.delayed = False
        found_inf = torch.zeros((), device=self.device)
        self.gradients.finish(self.params(), self.delayed_scale, found_inf)
        if self.delayed_scale is not None:
            self.passes.append(Pass(found_inf, None))

    def unscale(
        self,
        scale: torch.Tensor,
        found_inf: torch.Tensor,
        scaler: LossScaler,
        seen: set[int] | None = None,
        *,
        may_defer: bool = False,
    ) -> None:
        """Unscale what backward passes without a block brought; the next step depends on it.

        Args:
            scale: 0-dim tensor that all of their losses were multiplied by.
            found_inf: 0-dim float32 tensor, set to 1.0 if a gradient holds inf or NaN.
            scaler: whose scale it is.
            seen: identities of parameters already unscaled; extended.
            may_defer: leave it to a fused step where that loses less.
        """
        params = self.params()
        if may_defer and seen is None and not self.gradients.any_wide and self.stepping.takes_flags:
            if self.gradients.unscale_or_check(params, scale, found_inf):
                self.stepping.grad_scale = scale
        else:
            self.gradients.finish(params, scale, found_inf, seen)
        self.passes.append(Pass(found_inf, None, dynamic=scaler.dynamic))
        agree(self.passes, [self.ranks])

    # ---- the optimizer's own methods, for everybody who calls them

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's step on unscaled gradients, unless a backward pass overflowed; then nothing changes."""
        for observer in observers:
            observer.before_step(self)
        result = self._step(closure, args, kwargs)
        for observer in observers:
            observer.after_step(self)
        return result

    def _step(self, closure: Callable[[], Any] | None, args: Any, kwargs: Any) -> Any:
        if self.is_open:
            raise UsageError(
                f"{type(self.optimizer).__name__}.step() was called inside of a scale_loss block, where gradients are "
                "still multiplied by the loss scale. Dedent it: they are unscaled when the block is left."
            )
        if self.delayed:
            self._unscale_delayed()
        if closure is None:
            self.catch_up()
        passes, self.passes = self.passes, []
        casting = ops.active()
        with ops.PLAIN if casting is not None else nullcontext():
            found_inf = any_overflow(passes) if passes else None
            if found_inf is not None and (closure is not None or not self.stepping.takes_flags):
                if found_inf.item():
                    return self.stepping.skip()
                found_inf = None
            careful = None if closure is None else guarded(self, closure, casting)
            try:
                with self.keeper.in_place():
                    return self.stepping.take(careful, args, kwargs, found_inf)
            except ClosureOverflowed:
                return self.stepping.skip()
            except SparseGradient:
                if closure is not None or not (self.keeper.any and isinstance(self.optimizer, OfTorch)):
                    raise
                self._unfuse()
                if found_inf is not None and found_inf.item():
                    return self.stepping.skip()
                with self.stepping.flags_taken() as (scale, overflowed):
                    if overflowed is not None and overflowed.item():
                        return self.stepping.skip()
                    if scale is not None:
                        self.gradients.finish(self.params(), scale, torch.zeros((), device=self.device))
                    return self._step(None, args, kwargs)

    def call(self, closure: Callable[[], Any] | None, *args: Any, **kwargs: Any) -> Any:
        """Call the optimizer's ``step`` as a scaler does: not at all where it is known on the host to be skipped."""
        if closure is None and self.passes and not self.stepping.takes_flags:
            self.catch_up()
            passes, self.passes = self.passes, []
            if any_overflow(passes).item():
                return self.stepping.skip()
        if attached_to(self.optimizer) is not self:
            return self.step(closure, *args, **kwargs)
        step: Any = self.optimizer.step
        return step(*args, **kwargs) if closure is None else step(closure, *args, **kwargs)

    def cleared(self) -> None:
        """The optimizer's gradients were cleared: so is what was to come of them."""
        self.gradients.clear(self.params())
        self.delayed = False
        self.passes.clear()
        self.ranks.forget()

    @torch.no_grad()
    def clip(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients that the next step uses to a total norm, taken over all of them as one vector.

        Args:
            max_norm: the largest norm allowed.
            norm_type: of the p-norm; ``float("inf")`` for the largest element.

        Returns:
            The norm before, a 0-dim tensor; -1 if a scaled backward pass overflowed, since there is nothing to clip
            then. No device is read.
        """
        if self.delayed:
            self._unscale_delayed()
        self.catch_up()
        norm = self.gradients.clip(self.params(), max_norm, norm_type)
        return torch.where(any_overflow(self.passes) != 0, -1.0, norm) if self.passes else norm

    def _look(self, params: Sequence[torch.Tensor]) -> None:
        """Find the wrappers around the parameters."""
        half = halves(params) if self.keeper.any else []
        self.ranks.look(params, half, half if self.keeper.alike else [])

    def catch_up(self) -> None:
        """Have other ranks know what they do not know yet of the gradients and overflows since the last step."""
        if self.ranks.alone:
            return
        params = self.params()
        self._look(params)
        if self.ranks.reductions:
            if self.ranks.behind:
                self.ranks.catch_up(params, halves(params) if self.keeper.any else [])
            settle([self])

    def _unfuse(self) -> None:
        """Go on with torch's own step, which takes sparse gradients, on plain masters."""
        optimizer: Any = self.optimizer
        logger.info("%s goes on without its fused step, which takes no sparse gradients", type(optimizer).__name__)
        undress(optimizer, self)
        started = [*self.keeper.started(), *unfuse(optimizer).items()]
        self.keeper = MasterKeeper(optimizer, self.keeper.any, None, {id(param): value for param, value in started})
        self.gradients = self.keeper.gradients
        dress(optimizer, self)


def settle(attached: Sequence[AttachedOptimizer]) -> None:
    """Agree with other ranks on what the latest passes found, and tell their loss scales."""
    passes = {id(passed): passed for one in attached for passed in one.passes}
    for scaler, found_inf in agree(passes.values(), [one.ranks for one in attached]).items():
        scaler.update(found_inf, lambda: first_bad_gradient([one.optimizer for one in attached]))
