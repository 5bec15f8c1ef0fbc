"""Gradient release: parameters step during the backward pass, and their gradients are freed right away.

This file decides when a parameter steps, and by which factor its gradient is unscaled; ``base`` has the step itself.
The code that runs a scaled backward pass calls ``begin``, ``finish`` and ``abandon``. A parameter takes one gradient
per step: a second gradient is an error, so gradients are never accumulated.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from ..core.errors import UsageError
from ..core.removed import raise_removed
from ..core.scalars import in_scalar_dtype
from ..kernels.tensor_table import Number
from ..parameters.table import REDUCTIONS
from ..torch_internals.torch_compat import backward_pass_id, found_inf_of, queue_after_backward, scale_of, tensor_hooks
from .param_rows import GroupRows
from .release_checks import check, refuse_closure, refuse_gradient, refuse_ranks, refuse_second

__all__ = ["GradientRelease", "release_of"]

_BUCKET = 2**23  # bytes: small gradients wait until this many have arrived, so that one launch steps them together


def release_of(optimizer: object) -> GradientRelease | None:
    """Return the gradient release of an optimizer; None if it has none."""
    found = getattr(optimizer, "release", None)
    return found if isinstance(found, GradientRelease) else None


def _arrive(release: weakref.ref[GradientRelease], param: torch.Tensor) -> None:
    """Hook on a parameter. It does nothing after the optimizer has been freed."""
    alive = release()
    if alive is not None:
        alive.arrive(param)


def _is_released(param: torch.Tensor) -> bool:
    """True if a live optimizer has put its hook on the parameter."""
    hooks = [hook for hook in tensor_hooks(param) if isinstance(hook, partial) and hook.func is _arrive]
    return any(hook.args[0]() is not None for hook in hooks)


class GradientRelease:
    """The gradient release of an optimizer, which ``FusedOptimizer.attach`` returns.

    Args:
        optimizer: a fused optimizer, which must outlive this object.
        scaler: the ``GradScaler`` that scales the losses, if there is one.

    Attributes:
        scaler: as given, if it is enabled.
    """

    def __init__(self, optimizer: Any, scaler: torch.amp.GradScaler | None = None) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._hooks: dict[int, Any] = {}  # by the identity of the parameter
        self._places: dict[int, tuple[int, int]] = {}  # the group of each parameter, and its place in the optimizer
        self._rows: dict[tuple[int, int], GroupRows] = {}  # by group and the identity of the first parameter
        self._queued = -1  # the backward pass at whose end the waiting parameters will step
        self._scale: torch.Tensor | None = None  # the loss scale of the open block
        self._guard: Callable[[], None] | None = None  # raises if gradients must not be used now
        self._before = 0  # the number of parameters that had stepped when the block opened
        self.forget()

    # ---- what a user calls

    def __getattr__(self, name: str) -> Any:
        raise_removed(f"optimizers.GradientRelease.{name}")
        raise AttributeError(f"GradientRelease has no attribute {name!r}.", name=name, obj=self)

    def remove(self) -> None:
        """End gradient release: ``optimizer.step()`` steps all parameters again, as before ``attach``."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._rows.clear()
        self.forget()
        optimizer = self._optimizer()
        if optimizer is not None and optimizer.release is self:
            optimizer.release = None

    # ---- what the optimizer calls

    def start(self, model: torch.nn.Module) -> None:
        """Put a hook on every parameter.

        Raises:
            ArgumentValueError, UsageError: see ``FusedOptimizer.attach``.
        """
        optimizer: Any = self._optimizer()
        if optimizer.release is not None:
            raise UsageError(f"This {type(optimizer).__name__} is attached already; remove() that first.")
        check(optimizer, model, _is_released)
        optimizer.release = self
        # A plain backward pass adds to gradients from before, unless they were cleared or replaced.
        self._left.update((id(p), weakref.ref(p.grad)) for p in model.parameters() if p.grad is not None)
        self._watch()

    def begin_step(self, closure: Any, scaler: object) -> None:
        """Check the arguments of ``step``.

        Raises:
            UsageError: for a closure, or for a scaler other than the one passed to ``attach``.
        """
        refuse_closure(closure)
        scaled = self._stepped and getattr(self._optimizer(), "grad_scale", None) is not None
        if scaler is not None or (scaled and self.scaler is None):
            self.refuse_other_scaler(scaler)

    def end_step(self) -> None:
        """End the step: report an overflow to the scaler, and clear the gradients that are left."""
        optimizer: Any = self._optimizer()
        if self.scaler is not None and self._found is not None:
            found = self._found.to(optimizer.param_groups[0]["params"][0].device)
            flags = found_inf_of(self.scaler, optimizer)
            flags[found.device] = torch.maximum(found, flags.get(found.device, found))
            if hasattr(optimizer, "found_inf"):
                optimizer.found_inf = flags[found.device]
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = None  # a parameter without a hook still has one, which the next pass must not see
        self.forget()

    def forget(self) -> None:
        """Reset all records, for a new step."""
        self._waiting: dict[int, torch.Tensor] = {}  # parameters with a gradient that have not stepped yet
        self._bytes = 0
        self._stepped: set[int] = set()
        self._found: torch.Tensor | None = None  # 1.0 after a gradient of this pass was inf or NaN
        self._earlier: set[int] = set()  # parameters that had a gradient when the block opened
        self._left: dict[int, Callable[[], Any]] = {}  # gradients from before the release

    # ---- what the code around a backward pass calls

    @property
    def has_stepped(self) -> bool:
        """True if a parameter has stepped since ``step()`` was called."""
        return bool(self._stepped)

    def begin(
        self, params: Iterable[torch.Tensor], scale: torch.Tensor | None, guard: Callable[[], None] | None
    ) -> None:
        """Begin a ``scale_loss`` block.

        With a ``GradScaler``, the block belongs to other optimizers, so an overflow that the scaler must still learn of
        is kept.

        Args:
            params: the parameters of the optimizer, with their gradients from before the block.
            scale: the loss scale of the pass, or None.
            guard: a function to call before a gradient is used; raises if it must not be used.
        """
        self._scale, self._guard, self._before = scale, guard, len(self._stepped)
        self._found = None if self.scaler is None else self._found  # a scaler's ends with the step
        self._earlier = {id(param) for param in params if param.grad is not None}

    def finish(self, found_inf: torch.Tensor) -> bool:
        """End the block: add its overflow to ``found_inf``. Returns True if a parameter stepped in the block."""
        self._scale = self._guard = None
        self.add_overflow(found_inf)
        return len(self._stepped) > self._before

    def abandon(self) -> None:
        """Drop the waiting gradients of a failed pass. Parameters that have stepped keep their step."""
        self._scale = self._guard = None
        self._found = None if self.scaler is None else self._found  # a scaler's ends with the step
        self._waiting, self._bytes = {}, 0

    def add_overflow(self, found_inf: torch.Tensor) -> None:
        """Set ``found_inf`` to 1.0 if a gradient of this pass was inf or NaN."""
        if self._found is not None:
            found_inf.logical_or_(self._found.to(found_inf.device, non_blocking=True))

    def refuse_other_scaler(self, scaler: object) -> None:
        """Refuse a scaler whose scale was not divided out.

        Raises:
            UsageError: unless it is the scaler passed to ``attach``.
        """
        if scaler is None or scaler is not self.scaler:
            raise UsageError(
                "Parameters step during the backward pass, and their gradients were not divided by the scale of this "
                "GradScaler. Pass it to attach: optimizer.attach(model, scaler=scaler)."
            )

    def refuse_clipping(self, name: str) -> None:
        """Refuse to clip or unscale gradients that were freed.

        Raises:
            UsageError: if any parameter has already stepped.
        """
        if self._stepped:
            raise UsageError(
                f"{name} finds no gradients: gradient release used and freed them during the backward pass. To clip, "
                "end the release with remove()."
            )

    def refuse_block(self) -> None:
        """Refuse a ``scale_loss`` block together with a scaler.

        Raises:
            UsageError: if a scaler was passed to ``attach``.
        """
        if self.scaler is not None:
            raise UsageError(
                "A GradScaler was passed to attach(), and this is a scale_loss block; use only one of them."
            )

    def refuse_delay(self) -> None:
        """Refuse a block with ``delay_unscale=True``, which leaves its gradients to a later pass.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "delay_unscale=True leaves the gradients of this pass to the next one, and with gradient release they are "
            "used and freed in it. Run one backward pass for each step, or end the release with remove()."
        )

    # ---- in a backward pass

    def arrive(self, param: torch.Tensor) -> None:
        """Handle a parameter whose gradient is complete.

        Raises:
            UsageError: if the gradient cannot be used now.
        """
        if not self._waiting and not self._stepped:
            self._watch()  # the groups may have changed since the last step
        if id(param) not in self._places or param.grad is None:
            return
        if self._guard is not None:
            self._guard()
        if REDUCTIONS:
            refuse_ranks([param])
        added = id(param) in self._left and self._left[id(param)]() is param.grad
        if id(param) in self._stepped or id(param) in self._earlier or added:
            refuse_second(param)
        refuse_gradient(param)
        self._waiting[id(param)] = param
        self._bytes += param.numel() * param.grad.itemsize
        if self._queued != (running := backward_pass_id()):
            self._queued = running
            queue_after_backward(self._step_waiting)
        if self._bytes >= _BUCKET:
            self._step_waiting()

    def _watch(self) -> None:
        """Find the optimizer's parameters, and put hooks on parameters that are new or no longer frozen."""
        optimizer: Any = self._optimizer()
        self._places = {}
        for index, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                self._places[id(param)] = index, len(self._places)
                if param.requires_grad and id(param) not in self._hooks:
                    hook = partial(_arrive, weakref.ref(self))
                    self._hooks[id(param)] = param.register_post_accumulate_grad_hook(hook)
        for gone in self._hooks.keys() - self._places.keys():
            self._hooks.pop(gone).remove()

    @torch.no_grad()
    def _step_waiting(self) -> None:
        """Step the waiting parameters, and free their gradients."""
        optimizer: Any = self._optimizer()
        params = [p for p in self._waiting.values() if p.grad is not None]
        self._waiting, self._bytes = {}, 0
        if not params or optimizer is None:
            return
        inverse = self._inverse_scale(params[0].device)
        self._stepped.update(map(id, params))
        places = [self._places[id(param)] for param in params]
        taken = []
        groups: dict[int, list[int]] = {}
        for i, (group, _) in enumerate(places):
            groups.setdefault(group, []).append(i)
        for index, found in groups.items():
            members, its = [params[i] for i in found], [places[i][1] for i in found]
            key = index, id(members[0])
            group = optimizer.param_groups[index]
            self._rows[key] = rows = optimizer._rows_of(self._rows.get(key), group, members, its)
            taken.append((group, rows))
        if self._found is not None:
            for _, group_rows in taken:
                for one in group_rows.rows:
                    one.squared_norms(self._found)
        optimizer._take(taken, inverse, self._found)
        for param in params:
            param.grad = None

    def _inverse_scale(self, device: torch.device) -> Number:
        """Return the factor that unscales this pass. A scaled pass also gets its flag for inf and NaN here."""
        scale = self._scale
        if self.scaler is not None:
            scale = scale_of(self.scaler)
            if scale is None:
                raise UsageError("No loss has been scaled; call scaler.scale(loss).backward().")
        if scale is None:
            return 1.0
        if self._found is None:
            self._found = torch.zeros((), dtype=torch.float32, device=device)
        return in_scalar_dtype(scale.to(device, non_blocking=True)).reshape(()).reciprocal()
