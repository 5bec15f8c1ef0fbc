"""What halfstep keeps about one torch optimizer: how scaled gradients become the ones it steps with, and when not.

A ``Binding`` replaces ``step``, ``zero_grad`` and ``add_param_group`` on the optimizer instance, which may be any
``torch.optim.Optimizer``. Faces drive it: ``begin`` before a scaled backward pass, ``finish`` after it; the next
``step`` is skipped if a pass since the last one overflowed.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from ..core.errors import UsageError
from ..core.formats import is_half
from .blame import first_bad_gradient
from .casting import ops
from .closures import ClosureOverflowed, guarded
from .late import LateReader
from .masters.plain import MasterLink, PlainMasters
from .masters.wide import WideGradients, scale_grad, set_grad
from .ranks import Pass, Ranks, agree, any_overflow
from .replacing import replace_method
from .scaling import LossScaler
from .unscaling import Unscaler, reciprocal, widen

__all__ = ["Binding", "bind", "binding_of", "blame", "settle", "unbind"]

logger = logging.getLogger("halfstep")

_ATTRIBUTE = "_amp_stash"  # the name under which Apex kept its own; scripts ask for it to learn whether amp is on


def bind(
    optimizer: torch.optim.Optimizer,
    *,
    master_weights: bool,
    own_masters: bool = False,
    copies: torch.dtype | None = None,
    verbose: bool = True,
) -> Binding:
    """Attach a ``Binding`` to an optimizer.

    Args:
        optimizer: any.
        master_weights: whether its 16-bit parameters are to have fp32 masters.
        own_masters: let an optimizer that can (``halfstep.optimizers``) keep them itself, in its fused step; its groups
            then go on holding the model's parameters. Needs ``Tensor.grad_dtype``, which torch 2.13 has.
        copies: let an optimizer that can write its fp32 weights in this 16-bit dtype too, for op casting to use. Their
            gradients then come in 16 bits; before torch 2.13, which has ``Tensor.grad_dtype``, in fp32.
        verbose: whether to log what is skipped.

    Raises:
        UsageError: if it has one already.
    """
    if binding_of(optimizer) is not None:
        raise UsageError(
            f"This {type(optimizer).__name__} has been through amp.initialize, amp.decorate, FP16_Optimizer or "
            "amp.init once and can go only once; make a new optimizer to start over."
        )
    keeper = getattr(optimizer, "keep_masters", None)
    if master_weights and own_masters and keeper is not None and hasattr(torch.Tensor, "grad_dtype"):
        keeper()
        return Binding(optimizer, master_weights=False, wide=WideGradients(), verbose=verbose)
    keep_copies = getattr(optimizer, "keep_copies", None)
    if copies is not None and keep_copies is not None:
        kept = keep_copies(copies)
        wide = WideGradients(kept.has) if hasattr(torch.Tensor, "grad_dtype") else None
        return Binding(optimizer, master_weights=False, wide=wide, verbose=verbose)
    return Binding(optimizer, master_weights=master_weights, verbose=verbose)


def binding_of(optimizer: object) -> Binding | None:
    """The binding of an optimizer, or None."""
    found = getattr(optimizer, _ATTRIBUTE, None)
    return found if isinstance(found, Binding) else None


def unbind(optimizer: torch.optim.Optimizer) -> None:
    """Take the ``Binding`` off an optimizer and put its own methods back; one with masters keeps it.

    A method that was wrapped again since (by a scheduler, say) stays; with nothing left to do it only passes on.
    """
    binding = binding_of(optimizer)
    if binding is not None and binding.masters is None:
        binding.release()


class Binding:
    """The gradients and the step of one optimizer.

    Attributes:
        masters: the fp32 masters of its 16-bit parameters, or None.
        ranks: what it knows about other processes.
        passes: the scaled backward passes since the last step.
        session: whoever bound it may leave its own state here.
        models: weak references to the models it trains, which know the names of parameters; whoever bound it fills it.
        verbose: whether to log what is skipped.
        brought: whether the latest backward pass left a gradient.
        clipper: clips the gradients of the parameters in its groups.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        master_weights: bool,
        wide: WideGradients | None = None,
        verbose: bool,
    ) -> None:
        self.optimizer = optimizer
        self._wide = wide
        self.masters = PlainMasters(optimizer) if master_weights else None
        self.ranks = Ranks()
        self.passes: list[Pass] = []
        self.session: Any = None
        self.models: tuple[weakref.ref[torch.nn.Module], ...] = ()
        self.verbose = verbose
        self.brought = False
        self.clipper = Unscaler()
        self._unscaler = Unscaler()
        self._delayed = False  # the gradients are still scaled, by:
        self._delayed_scale: torch.Tensor | None = None
        self._stash: dict[torch.Tensor, torch.Tensor] = {}
        self._cleared: list[torch.Tensor] = []  # had no gradient of their own when the pass began
        self._skipped = 0
        self._skipped_on_device: torch.Tensor | None = None
        self._late = LateReader(1)  # what delayed passes found; every other pass is its scaler's to tell of
        self._own_step = optimizer.step
        self._own_zero_grad = optimizer.zero_grad
        self._own_add_param_group = optimizer.add_param_group
        setattr(optimizer, _ATTRIBUTE, self)
        self._replaced = [
            replace_method(optimizer, "step", self.step),
            replace_method(optimizer, "zero_grad", self.zero_grad),
            replace_method(optimizer, "add_param_group", self.add_param_group),
            replace_method(optimizer, "clip_master_grads", self.clip_master_grads),
        ]

    # ---- what the faces ask

    @property
    def device(self) -> torch.device:
        """Where the first parameter lives: flags and scales are kept there."""
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                return param.device  # type: ignore[no-any-return]
        return torch.device("cpu")

    @property
    def steps_skipped(self) -> int:
        """How many steps were skipped for an overflow. Reads the device."""
        unread = self._skipped_on_device
        return self._skipped + (0 if unread is None else int(unread))

    @property
    def delayed_scale(self) -> torch.Tensor | None:
        """By what the gradients of delayed passes are still scaled; None if there are none."""
        return self._delayed_scale if self._delayed else None

    @property
    def has_fresh_grads(self) -> bool:
        """Whether a 16-bit parameter has a gradient that its master has not had yet."""
        return self.masters is not None and any(link.fresh_grad() is not None for link in self.masters.links)

    def begin(self, scale: torch.Tensor | None, seen: set[int] | None) -> None:
        """Set aside what gradients there are, so that a backward pass scaled by ``scale`` brings only its own.

        Args:
            scale: the 0-dim tensor the loss is multiplied by; None if it is not scaled.
            seen: identities of parameters already set aside for this pass by another optimizer; extended. None if
                there is no other.
        """
        direct = self._direct()
        if self.ranks.alone:
            if not self._delayed or self._delayed_scale is not scale:
                self._set_aside(scale, direct, seen)
            return
        self.ranks.look(self._links, direct)
        scale = self.ranks.gradient_scale(scale)
        reduced = any(link.reduced is not None for link in self._links)
        if not self._delayed or self._delayed_scale is not scale or reduced or self._stash:
            self._set_aside(scale, direct, seen)
        self.ranks.watch(scale, self._links, direct)

    def _set_aside(self, scale: torch.Tensor | None, direct: list[torch.Tensor], seen: set[int] | None) -> None:
        self._cleared = []
        if self._delayed:
            self._note_delayed()
        if self.masters is not None:
            self.masters.adopt_unfrozen(self.optimizer)
            # Gradients of a plain loss.backward() count too: nothing is lost.
            self.masters.collect(None, torch.zeros((), device=self.device), set())
            self.masters.drop_collected()
            self.ranks.preload(scale, self.masters.links)
        if scale is None and self._wide is None:
            return
        if scale is None:
            direct = [param for param in direct if self._wide is not None and self._wide.takes(param)]
        mine = [p for p in direct if not (seen and id(p) in seen)]
        for param in [p for p in mine if p.grad is not None]:
            if self.ranks.carry(param):
                # It stays where ranks average it, scaled like what will be added to it.
                scale_grad(param, scale)
            else:
                grad: torch.Tensor = param.grad  # type: ignore[assignment]
                # A view may be of a DistributedDataParallel bucket, which the next backward pass overwrites.
                self._stash[param] = grad.clone() if grad._is_view() else grad
                param.grad = None
        self._cleared = [p for p in mine if p.grad is None]
        if seen is not None:
            seen.update(map(id, direct))
        if self._wide is not None:
            # DistributedDataParallel wants gradients of the parameter's own dtype.
            self._wide.open([param for param in direct if is_half(param) or not self.ranks.hold(param)])

    def abandon(self) -> None:
        """After ``begin``, when the backward pass failed: drop what it brought and put back what was set aside.

        If gradients of delayed passes lay in the same place, or went to other ranks, there is no way back: the next
        step is skipped.
        """
        lost = self.ranks.abandon(self._links, self._direct())
        lost = lost or (self._delayed and bool(self._links or self._cleared))
        if self.masters is not None:
            self.masters.zero_model_grads(set_to_none=True)
        for param in self._cleared:
            param.grad = None
        for param, grad in self._stash.items():
            set_grad(param, grad)
        self._stash.clear()
        self._delayed = False
        if lost:
            self.passes.append(Pass(torch.ones((), device=self.device), None))

    def finish(
        self, scale: torch.Tensor | None, found_inf: torch.Tensor, seen: set[int] | None, *, delay: bool
    ) -> None:
        """After ``begin`` and the backward pass: unscale what it brought and add what was set aside.

        Args:
            scale: as given to ``begin``.
            found_inf: 0-dim float32 tensor, set to 1.0 if a new gradient holds inf or NaN.
            seen: identities of parameters already served by another optimizer in this pass; extended. None if there
                is no other.
            delay: leave the gradients scaled for now; the next undelayed pass, or ``step``, unscales all of them.
        """
        scale = self.ranks.gradient_scale(scale)
        self._delayed, self._delayed_scale = delay, scale
        self.brought = self.has_fresh_grads or any(param.grad is not None for param in self._direct())
        if self.ranks.reductions:
            self.ranks.close(self._links, self._direct())
        if not delay:
            self._unscale(scale, found_inf, seen)

    def unscale(self, scale: torch.Tensor, found_inf: torch.Tensor, scaler: LossScaler, seen: set[int]) -> None:
        """Unscale what backward passes without ``begin`` brought; the next step depends on it.

        Args:
            scale: 0-dim tensor that all of their losses were multiplied by.
            found_inf: 0-dim float32 tensor, set to 1.0 if a gradient holds inf or NaN.
            scaler: whose scale it is.
            seen: identities of parameters already unscaled; extended.
        """
        self._delayed = False
        self._unscale(scale, found_inf, seen)
        self.passes.append(Pass(found_inf, None, dynamic=scaler.dynamic))
        agree(self.passes, [self.ranks])

    def release(self) -> None:
        """Put the optimizer's own methods back, where nobody has replaced ours since."""
        for undo in self._replaced:
            undo()
        delattr(self.optimizer, _ATTRIBUTE)

    # ---- what replaces the optimizer's own methods

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """The optimizer's step on unscaled gradients, unless a backward pass overflowed; then nothing changes."""
        self._tell_of_delayed()
        if self._delayed:
            self._note_delayed()
        if closure is None:
            self.catch_up()
        passes, self.passes = self.passes, []
        casting = ops.active()
        with ops.PLAIN if casting is not None else nullcontext():
            if closure is None:
                self._complete_masters()
            if passes:
                found_inf = any_overflow(passes)
                if closure is None and getattr(self.optimizer, "_step_supports_amp_scaling", False):
                    return self._run_guarded(found_inf, kwargs)
                if found_inf.item():
                    self._skip()
                    return None
            try:
                return self._run(None if closure is None else guarded(self, closure, casting), kwargs)
            except ClosureOverflowed:
                self._skip()
                return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the optimizer's parameters, of the 16-bit parameters behind masters, and flags."""
        self._own_zero_grad(set_to_none)
        if self.masters is not None:
            self.masters.zero_model_grads(set_to_none)
            self.masters.clear_master_grads()
        if self._wide is not None:
            self._wide.reset(self._direct())
        self._stash.clear()
        self.passes.clear()
        self.ranks.forget()
        self._delayed = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """The optimizer's own, then masters for what 16-bit parameters came in."""
        self._own_add_param_group(param_group)
        if self.masters is not None:
            self.masters.adopt(self.optimizer, self.optimizer.param_groups[-1])

    @torch.no_grad()
    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients that the next step uses to a total norm, taken over all of them as one vector.

        Args:
            max_norm: the largest norm allowed.
            norm_type: of the p-norm; ``float("inf")`` for the largest element.

        Returns:
            The norm before, a 0-dim tensor; -1 if a scaled backward pass overflowed, since there is nothing to clip
            then. No device is read.
        """
        if self._delayed:
            self._note_delayed()
        self.catch_up()
        self._complete_masters()
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        norm = self.clipper.clip(params, max_norm, norm_type)
        return torch.where(any_overflow(self.passes) != 0, -1.0, norm) if self.passes else norm

    # ---- inside

    @property
    def _links(self) -> list[MasterLink]:
        return [] if self.masters is None else self.masters.links

    def catch_up(self) -> None:
        """Have other ranks know what they do not know yet of the gradients and overflows since the last step."""
        if self.ranks.alone:
            return
        self.ranks.look(self._links, self._direct())
        if self.ranks.reductions:
            if self.ranks.behind:
                self._complete_masters()
                self.ranks.catch_up(self._links, self._direct(), wide=self._wide is not None)
            settle([self])

    def _complete_masters(self) -> None:
        """Bring to the masters what no scaled pass has: gradients of a plain backward, edits of 16-bit gradients."""
        if self.masters is not None:
            self.masters.drop_spent()
            self.masters.adopt_unfrozen(self.optimizer)
            self.masters.take_edits()
            self.masters.collect(None, torch.zeros((), device=self.device), set())

    def _direct(self) -> list[torch.Tensor]:
        """The parameters that the optimizer updates without a master."""
        if self.masters is None or not self.masters.links:
            return [p for group in self.optimizer.param_groups for p in group["params"]]
        owned = {id(link.master) for link in self.masters.links}
        return [p for group in self.optimizer.param_groups for p in group["params"] if id(p) not in owned]

    def _note_delayed(self) -> None:
        """Unscale what delayed passes left, by the scale they had; their overflow counts for the next step."""
        self._delayed = False
        found_inf = torch.zeros((), device=self.device)
        self._unscale(self._delayed_scale, found_inf, set())
        if self._delayed_scale is not None:
            self.passes.append(Pass(found_inf, None))
            self._late.post(found_inf)

    @torch.no_grad()
    def _unscale(self, scale: torch.Tensor | None, found_inf: torch.Tensor, seen: set[int] | None) -> None:
        """Unscale the gradients that the last pass brought, then add what was set aside before it."""
        inv_scale = None if scale is None else reciprocal(scale)
        direct = self._direct()
        if self.masters is not None or self._wide is not None:
            seen = set() if seen is None else seen
            if self.masters is not None:
                self.masters.collect(inv_scale, found_inf, seen)
            if self._wide is not None:
                self._wide.collect(direct, self._stash, inv_scale, found_inf, seen)
        if inv_scale is not None:
            self._unscaler(direct, inv_scale, found_inf, seen)
        for param, before in self._stash.items():
            if param.grad is None:
                set_grad(param, before)
            elif param.grad.is_sparse or before.is_sparse:
                # torch adds no sparse tensors of 16 bits
                param.grad = (widen(before) + widen(param.grad)).to(before.dtype)
            else:
                param.grad.add_(before)
        self._stash.clear()

    def _run(self, closure: Callable[[], Any] | None, kwargs: dict[str, Any]) -> Any:
        result = self._own_step(**kwargs) if closure is None else self._own_step(closure, **kwargs)
        if self.masters is not None:
            self.masters.copy_to_model()
            self.masters.spend_master_grads()
        return result

    def _run_guarded(self, found_inf: torch.Tensor, kwargs: dict[str, Any]) -> Any:
        """A step that the optimizer itself skips on the device, by torch's contract for scalers: nothing is read."""
        optimizer: Any = self.optimizer
        optimizer.grad_scale, optimizer.found_inf = None, found_inf
        try:
            result = self._run(None, kwargs)
        finally:
            del optimizer.grad_scale, optimizer.found_inf
        if self._skipped_on_device is None:
            self._skipped_on_device = torch.zeros_like(found_inf)
        self._skipped_on_device.add_(found_inf)  # in place, so that a captured step goes on counting
        return result

    def _skip(self) -> None:
        self._skipped += 1
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # else schedulers warn of a forgotten step
        if self.masters is not None:
            self.masters.spend_master_grads()

    def _tell_of_delayed(self) -> None:
        for (found_inf,) in self._late.poll():
            if found_inf and self.verbose:
                logger.info("Gradient overflow in a delayed pass. Skipping step")


def settle(bindings: Sequence[Binding]) -> None:
    """Agree with other ranks on what the latest passes found, and tell their loss scales."""
    passes = {id(passed): passed for binding in bindings for passed in binding.passes}
    for scaler, found_inf in agree(passes.values(), [binding.ranks for binding in bindings]).items():
        scaler.update(found_inf, lambda: blame([binding.optimizer for binding in bindings]))


def blame(optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """The first parameter of these optimizers whose gradient is not finite, in words. Reads the device."""
    bindings = [binding for optimizer in optimizers if (binding := binding_of(optimizer)) is not None]
    models = [model for binding in bindings for ref in binding.models if (model := ref()) is not None]
    return first_bad_gradient(optimizers, models)
