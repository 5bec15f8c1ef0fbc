"""``amp.GradScaler``: loss scaling with explicit calls, a replacement for the scalers of torch and Paddle."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch

from ..casting.dynamo import eager
from ..core.checks import as_number, check_number
from ..core.dtypes import HALF_DTYPES
from ..core.errors import ArgumentTypeError, UsageError
from ..core.inner_optimizers import inner_optimizer
from ..core.loss_scale import DynamicLossScale
from ..optimizers.release import release_of
from ..parameters.unscale import Unscaler
from ..stepping.attached import AttachedOptimizer, attached_to
from ..stepping.backward import Subscriber, Window, WindowState, blame
from ..stepping.ranks.ddp_sync import BackwardRecord, share_overflow
from ..stepping.scaled_backward import before_unscaling
from ..stepping.scaling_checks import warn_scaled_twice
from ..torch_internals.torch_compat import OptState
from .iteration import Iteration, StepResult
from .scaler_settings import ScalerSettings

__all__ = ["GradScaler"]


class _FirstStep(Subscriber):
    """Logs findings after the first step of an optimizer that ``amp`` did not prepare; its model may still be cast."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = ref(optimizer)  # the user's object, which may be a wrapper

    def stepped(self, window: Window) -> None:
        window.subscribers.remove(self)
        from ..diagnostics.findings.checking import log_first_step  # imported on first use

        log_first_step(self._optimizer())


class GradScaler(ScalerSettings):
    """Scale losses up so that fp16 gradients do not vanish, and skip steps whose gradients overflowed.

    ::

        scaler = amp.GradScaler(init_loss_scaling=1024)
        for x, y in loader:
            with amp.auto_cast():
                loss = loss_fn(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)   # unscales the gradients, and steps unless one is inf or NaN
            scaler.update()          # updates the scale
            optimizer.zero_grad()

    To accumulate gradients, call ``step`` and ``update`` only after the last of several backward passes. To clip, call
    ``scaler.unscale_(optimizer)`` and then ``torch.nn.utils.clip_grad_norm_``, or ``scaler.clip_grad_norm_`` alone.

    It supports any ``torch.optim.Optimizer``, including optimizers with fp32 masters from ``amp.decorate`` or
    ``amp.initialize``, and several optimizers, each of which skips its step for its own overflow only. Gradients may
    have any floating-point or complex dtype, be sparse, or be missing. If the optimizer reads torch's ``grad_scale``
    and ``found_inf`` (``fused=True``), no call waits for the device, and a CUDA graph can capture the whole step;
    otherwise each step reads the device once. Skipped steps are logged at level INFO of the logger "halfstep", one step
    late.

    It is a ``torch.amp.GradScaler`` with all its methods. torch's argument names are keyword aliases.

    Args:
        enable: False disables everything except the optimizer's step. A device, which is torch's first argument, counts
            as True and is otherwise ignored, because the scale is kept on the device of the losses.
        init_loss_scaling: the initial scale, a finite number above zero.
        incr_ratio: the factor by which the scale grows, above 1.
        decr_ratio: the factor by which the scale shrinks, between 0 and 1.
        incr_every_n_steps: the number of finite steps in a row before the scale grows; None for never.
        decr_every_n_nan_or_inf: the number of overflowing steps in a row before the scale shrinks; None for never.
        use_dynamic_loss_scaling: False keeps the scale constant. Overflowing steps are still skipped.
        min_loss_scaling: the floor of the scale; None means the smallest normal float32 number.
        max_loss_scaling: the ceiling of the scale; None means the largest float32 number.
        collapse_after: the number of overflows in a row at the floor, or at 2**-14 if the floor is lower, after which
            ``update`` raises ``LossScaleCollapsed``; None for never.
        enabled: torch's name of ``enable``.
        init_scale: torch's name of ``init_loss_scaling``.
        growth_factor: torch's name of ``incr_ratio``.
        backoff_factor: torch's name of ``decr_ratio``.
        growth_interval: torch's name of ``incr_every_n_steps``.
        device: ignored; for compatibility with torch.

    Raises:
        ArgumentValueError: for a value outside these ranges.
        ArgumentTypeError: for a flag that is neither True nor False.

    Source: Paddle's AMP guide, sections 2.1.2 and 3.1; ``torch.amp.GradScaler``.
    """

    def _start(self, enabled: bool, rule: DynamicLossScale, dynamic: bool) -> None:
        super()._start(enabled, rule, dynamic)
        # For each optimizer that `amp` did not prepare: its state, and True if it wraps another optimizer.
        self._attached: WeakKeyDictionary[torch.optim.Optimizer, tuple[AttachedOptimizer, bool]] = WeakKeyDictionary()
        self._moved_from: torch.Tensor | None = None  # the scale of the latest losses, if `minimize` changed it since
        self._iteration = Iteration()

    @property
    def _per_optimizer_states(self) -> dict[int, dict[str, Any]]:  # type: ignore[override]
        return self._iteration.states  # for code that reads torch's private attribute

    # ---- the training step, in its order

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss by the scale.

        Args:
            outputs: a floating-point tensor, or a possibly nested iterable of tensors; 16-bit tensors are scaled in
                fp32.

        Returns:
            The scaled tensors in the same structure; ``outputs`` itself if the scaler is disabled.

        Raises:
            ArgumentTypeError: for any other value.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, torch.Tensor):
            if not (outputs.is_floating_point() or outputs.is_complex()):
                raise ArgumentTypeError(f"scale needs a floating-point tensor, not a tensor of {outputs.dtype}.")
            self._iteration.losses += 1
            if self._iteration.unscaled:
                self._iteration.fix_versions()
            self._moved_from = None
            self._home = self._home or outputs.device
            scale = self._scaler.scale(self._home).to(outputs.device, non_blocking=True)
            return (outputs.float() if outputs.dtype in HALF_DTYPES else outputs) * scale
        if isinstance(outputs, Iterable) and not isinstance(outputs, (str, bytes)):
            scaled = map(self.scale, outputs)
            return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled
        raise ArgumentTypeError(f"scale needs a tensor or an iterable of tensors, not {type(outputs).__name__}.")

    @eager
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of an optimizer by the scale, so that you can read or clip them before ``step``.

        Gradients of 16-bit parameters with masters become fp32. ``step`` uses the gradients with all your changes.

        Args:
            optimizer: the optimizer whose gradients to unscale, once per iteration and after all its backward passes.

        Raises:
            UsageError: if ``unscale_`` or ``step`` was already called for this optimizer since the last ``update``.
        """
        if not self._enabled:
            return
        self._iteration.refuse_second(optimizer)
        if (release := release_of(optimizer)) is not None:
            release.refuse_clipping("unscale_")
        self._unscale(optimizer, self._attached_to(optimizer))

    @eager
    def clip_grad_norm_(self, optimizer: torch.optim.Optimizer, max_norm: float) -> torch.Tensor:
        """Unscale the gradients and clip them to a 2-norm; one read gives the norm and the check for inf and NaN.

        After ``unscale_``, it only clips.

        Args:
            optimizer: see ``unscale_``. If it has masters, the gradients of the masters are clipped.
            max_norm: the largest norm allowed.

        Returns:
            The norm of the unscaled gradients before clipping, as a 0-dim tensor; inf or NaN if they overflowed, so
            that ``step`` will skip. The call does not read the device.

        Raises:
            UsageError: see ``unscale_``, unless ``unscale_`` was called before.
            ArgumentTypeError: if ``max_norm`` is not a number.
            ArgumentValueError: if ``max_norm`` is below 0 or NaN.
        """
        if (release := release_of(optimizer)) is not None:
            release.refuse_clipping("clip_grad_norm_")
        check_number("max_norm", max_norm, finite=False)
        attached = self._attached_to(optimizer)
        unscaled = self._iteration.states[id(optimizer)]["stage"] is OptState.UNSCALED
        if unscaled or not self._enabled or attached_to(optimizer) is not None:
            if not unscaled:
                self.unscale_(optimizer)
            return attached.window.gradients.clip(max_norm, 2.0)
        self._iteration.refuse_second(optimizer)
        return self._unscale(optimizer, attached, max_norm=max_norm)

    @eager
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> StepResult:  # type: ignore[override]
        """Step an optimizer unless its gradients hold inf or NaN. Unscale them first, unless ``unscale_`` did.

        Args:
            optimizer: the optimizer to step, once per iteration.
            *args: arguments of ``optimizer.step``. A closure, here or as ``closure=``, must call
                ``scaler.scale(loss).backward()`` and return the loss. If its gradients overflow, it runs again at a
                lower scale, up to 64 times.
            **kwargs: keyword arguments of ``optimizer.step``.

        Returns:
            A result that is true if the optimizer stepped: ``if scaler.step(optimizer): scheduler.step()``. Only its
            truth value reads the device.

        Raises:
            UsageError: if ``step`` was already called for this optimizer since the last ``update``, if no loss was
                scaled, or if a closure does not use ``scale`` or overflows at every scale.
        """
        if not self._enabled:
            return StepResult(torch.zeros((), dtype=torch.float32, device="cpu"), optimizer.step(*args, **kwargs))
        closure, args = (args[0], args[1:]) if args else (kwargs.pop("closure", None), args)
        state = self._iteration.states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise UsageError("step() has already been called since the last update().")
        attached = self._attached_to(optimizer)
        if closure is not None:
            closure = self._evaluating(optimizer, attached, closure)
        elif state["stage"] is OptState.READY:
            self._unscale(optimizer, attached, may_defer=True)
        returned = attached.step_unless_overflow(optimizer, closure, *args, **kwargs)
        state["stage"] = OptState.STEPPED
        return StepResult(next(iter(state["found_inf_per_device"].values())), returned)

    @eager
    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Update the scale, once at the end of each iteration.

        Args:
            new_scale: a scale to set instead, a number or a tensor with one element.

        Raises:
            LossScaleCollapsed: if gradients overflowed ``collapse_after`` times in a row with the scale at its floor.
            ArgumentValueError: if ``new_scale`` is not a finite number above zero.
            UsageError: if neither ``step`` nor ``unscale_`` was called since the last ``update``.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            self._scaler.set_scale(as_number("new_scale", new_scale))
        ended, self._iteration = self._iteration, Iteration()
        for window in ended.windows:
            # If the optimizer did not step, the next step must not use the records of this iteration.
            window.records = [record for record in window.records if record.scaler is not self._scaler]
        if new_scale is None:
            self._scaler.update(ended.overflow(), lambda: blame(ended.windows))

    def minimize(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> StepResult:
        """Call ``step`` and ``update``, and return the result of ``step``. You may call it for several optimizers.

        In Paddle, the second argument is the scaled loss. It is ignored: call ``scaled.backward()`` before.
        """
        result = self.step(optimizer, **kwargs)
        if self._moved_from is None and self._home is not None:
            self._moved_from = self._scaler.scale(self._home)
        self.update()
        return result

    # ---- inside

    def _attached_to(self, optimizer: torch.optim.Optimizer) -> AttachedOptimizer:
        """Return the ``AttachedOptimizer`` of an optimizer, or one that only this scaler uses."""
        found = getattr(optimizer, "_amp_stash", None)
        if isinstance(found, AttachedOptimizer):
            return found
        if not hasattr(optimizer, "param_groups"):
            raise ArgumentTypeError(f"GradScaler needs a torch.optim.Optimizer, not {type(optimizer).__name__}.")
        found, wraps = self._attached.get(optimizer, (None, True))
        if wraps:  # the inner optimizer may have been attached since the last call
            found = attached_to(optimizer) or found
        if found is None:
            found = AttachedOptimizer(optimizer)
            found.window.subscribers.append(_FirstStep(optimizer))
            self._attached[optimizer] = found, inner_optimizer(optimizer) is not None
        return found

    def _unscale(
        self,
        optimizer: torch.optim.Optimizer,
        attached: AttachedOptimizer,
        *,
        may_defer: bool = False,
        max_norm: float | None = None,
    ) -> torch.Tensor:
        """Unscale the gradients of an optimizer, and record the overflow for its next step.

        The exit of a block does the same for the pass in the block.

        Args:
            optimizer: the user's object, which may be a wrapper.
            attached: the ``AttachedOptimizer`` of the optimizer.
            may_defer: True to let a fused step unscale 16-bit gradients in fp32.
            max_norm: the norm to which to clip; None to leave the gradients unclipped.

        Returns:
            The overflow flag; with ``max_norm``, the norm before clipping.
        """
        if self._home is None:
            raise UsageError(
                "No loss has been scaled, so the gradients must not be divided by the scale. Call "
                "scaler.scale(loss).backward() before unscale_() or step()."
            )
        window, iteration, table = attached.window, self._iteration, attached.window.table
        # The tensor that `update` changes in place, so it is also the scale of the next losses.
        window.scale = self._scaler.state(self._home).scale
        scale = window.scale if self._moved_from is None else self._moved_from
        table.refresh()
        params, found_inf = table.params, torch.zeros_like(scale)
        result = found_inf
        window.begin_plain(self, found_inf)
        if not iteration.losses and window.release is None and all(p.grad is None for p in params):
            raise UsageError(
                f"No loss has been scaled since the last update(), and the parameters of this "
                f"{type(optimizer).__name__} have no gradients. Call scaler.scale(loss).backward() before unscale_() "
                "or step()."
            )
        for callback in before_unscaling:
            callback()
        window.notify_closed(self._scaler, scale, by="" if max_norm is not None else "GradScaler")
        if any(record.scaler is not self._scaler for record in window.records):
            warn_scaled_twice(window, "this GradScaler")
        done = iteration.among(params) if iteration.unscaled else set()
        window.state = WindowState.FINISHING  # from here to `close` an interrupt drops the gradients
        iteration.states[id(optimizer)].update(stage=OptState.UNSCALED, found_inf_per_device={scale.device: found_inf})
        iteration.windows.append(window)
        if done:
            check = Unscaler()
            check.unscale(check.gather(p for p in params if id(p) in done), torch.ones_like(scale), found_inf)
        if max_norm is not None:
            left = [p for p in params if id(p) not in done]
            result = window.gradients.unscale_and_clip(left, scale, found_inf, max_norm)
        elif may_defer and not done and not table.has_masters and attached.supports_found_inf:
            attached.unscale_late(scale, found_inf)
        else:
            window.gradients.finish(scale, found_inf, done)
        window.records.append(BackwardRecord(found_inf, None, not window.ranks.reductions, self._scaler))
        window.close()
        if window.ranks.reductions:
            share_overflow(window.records, [window.ranks])
        # The entries of `done` keep the versions from before the pass of a later loss.
        iteration.unscaled.update({id(p): (p.grad, None) for p in params if p.grad is not None and id(p) not in done})
        return result

    def _evaluating(
        self, optimizer: torch.optim.Optimizer, attached: AttachedOptimizer, closure: Callable[[], Any]
    ) -> Callable[[], Any]:
        """Wrap a closure so that its gradients are unscaled; the step runs the wrapper again after an overflow."""

        def evaluate() -> Any:
            losses = self._iteration.losses
            loss = closure()
            if self._iteration.losses == losses:
                raise UsageError(
                    "The closure given to GradScaler.step did not scale its loss, so its gradients would be divided by "
                    "a scale that never multiplied them; call scaler.scale(loss).backward() in it and return the loss."
                )
            found_inf = self._unscale(optimizer, attached)
            if self._scaler.dynamic and found_inf.item():
                self._scaler.update(found_inf, lambda: blame([attached.window]))
            return loss

        return evaluate

    def __getstate__(self) -> dict[str, Any]:
        """Return settings and state, which are complete only after ``update`` and before ``unscale_`` or ``step``."""
        if self._iteration.windows:
            raise UsageError("Pickle or copy a GradScaler after update(), not between unscale_ or step and update().")
        return super().__getstate__()
