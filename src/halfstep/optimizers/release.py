"""Gradient release: parameters step during the backward pass, and their gradients are freed right away.

This file decides when a parameter steps, and by which factor its gradient is unscaled; ``base`` has the step itself.
The code that runs a scaled backward pass calls ``begin``, ``finish`` and ``abandon``. A parameter takes one gradient
per step: a second gradient is an error, so gradients are never accumulated.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..core.errors import UsageError
from ..core.inner_optimizers import params_of
from ..core.scalars import in_scalar_dtype
from ..kernels.tensor_table import Number
from ..parameters.table import REDUCTIONS, Slot
from ..torch_internals.torch_compat import backward_pass_id, found_inf_of, queue_after_backward, scale_of, tensor_hooks
from .param_rows import GroupRows
from .release_checks import check, refuse_closure, refuse_gradient, refuse_ranks, refuse_second

__all__ = ["GradientRelease", "release_of"]

_BUCKET = 2**23  # bytes: small gradients wait until this many have arrived, so that one launch steps them together


def release_of(optimizer: object) -> GradientRelease | None:
    """Return the gradient release of an optimizer; None if it has none."""
    found = getattr(optimizer, "release", None)
    return found if isinstance(found, GradientRelease) else None


@dataclass(eq=False)
class _Row:
    """The row of one parameter in a gradient release.

    Attributes:
        slot: the parameter, in the table of the optimizer.
        hook: the handle of the hook on the parameter, which has a weak reference to this row; None while the parameter
            has been frozen since it came.
        place: the index of the parameter in the optimizer.
        stepped: True if the parameter stepped since the last ``step()``.
        before: a weak reference to the gradient from before ``attach`` or the open block; None without one.
        rows: the rows of the fused step whose first parameter is this one, for the next step.
    """

    slot: Slot
    hook: Any = None
    place: int = 0
    stepped: bool = False
    before: Callable[[], Any] | None = None
    rows: GroupRows | None = None


def _arrive(release: weakref.ref[GradientRelease], row: weakref.ref[_Row], param: torch.Tensor) -> None:
    """Hook on a parameter. It does nothing after the optimizer has been freed."""
    alive = release()
    if alive is not None:
        alive.arrive(row)


def _unhook(rows: Iterable[_Row]) -> None:
    for hook in [row.hook for row in rows if row.hook is not None]:
        hook.remove()


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
        stepped: the number of parameters that have stepped since ``step()`` was called.
    """

    def __init__(self, optimizer: Any, scaler: torch.amp.GradScaler | None = None) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._rows: list[_Row] = []
        self._queued = -1  # the backward pass at whose end the waiting parameters will step
        self.forget()

    # ---- what a user calls

    def remove(self) -> None:
        """End gradient release: ``optimizer.step()`` steps all parameters again, as before ``attach``."""
        _unhook(self._rows)
        self._rows = []
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
        self.begin(None, None)

    def begin_step(self, closure: Any, scaler: object) -> None:
        """Check the arguments of ``step``.

        Raises:
            UsageError: for a closure, or for a scaler other than the one passed to ``attach``.
        """
        refuse_closure(closure)
        scaled = self.stepped and getattr(self._optimizer(), "grad_scale", None) is not None
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
        for param in params_of(optimizer):
            param.grad = None  # a parameter without a hook still has one, which the next pass must not see
        self.forget()

    def forget(self) -> None:
        """Reset all records, for a new step."""
        self._waiting: list[_Row] = []  # parameters with a gradient that have not stepped yet
        self._bytes = 0
        self.stepped = 0
        self._found: torch.Tensor | None = None  # 1.0 after a gradient of this pass was inf or NaN
        for row in self._rows:
            row.stepped, row.before = False, None

    # ---- what the code around a backward pass calls

    def begin(self, scale: torch.Tensor | None, guard: Callable[[], None] | None) -> None:
        """Begin a ``scale_loss`` block.

        With a ``GradScaler``, the block belongs to other optimizers, so an overflow that the scaler must still learn of
        is kept.

        Args:
            scale: the loss scale of the pass, or None.
            guard: a function to call before a gradient is used; raises if it must not be used.
        """
        self._scale, self._guard = scale, guard
        self._before = self.stepped  # the number of parameters that had stepped when the block opened
        self._found = None if self.scaler is None else self._found  # a scaler's ends with the step
        self._watch()
        for row in self._rows:
            row.before = None if (grad := row.slot.param.grad) is None else weakref.ref(grad)

    def finish(self, found_inf: torch.Tensor) -> bool:
        """End the block: add its overflow to ``found_inf``. Returns True if a parameter stepped in the block."""
        self._scale = self._guard = None
        self.add_overflow(found_inf)
        return self.stepped > self._before

    def abandon(self) -> None:
        """Drop the waiting gradients of a failed pass. Parameters that have stepped keep their step."""
        self._scale = self._guard = None
        self._found = None if self.scaler is None else self._found  # a scaler's ends with the step
        self._waiting, self._bytes = [], 0

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
        if self.stepped:
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

    def arrive(self, ref: weakref.ref[_Row]) -> None:
        """Handle a parameter whose gradient is complete.

        Raises:
            UsageError: if the gradient cannot be used now.
        """
        if not self._waiting and not self.stepped:
            self._watch()  # the groups may have changed since the last step
        row = ref()
        if row is None or (param := row.slot.param).grad is None:
            return
        if self._guard is not None:
            self._guard()
        if REDUCTIONS:
            refuse_ranks([param])
        if row.stepped or row.slot.grad.saved is not None or (row.before is not None and row.before() is param.grad):
            refuse_second(param)
        refuse_gradient(param)
        self._waiting.append(row)
        self._bytes += param.numel() * param.grad.itemsize
        if self._queued != (running := backward_pass_id()):
            self._queued = running
            queue_after_backward(self._step_waiting)
        if self._bytes >= _BUCKET:
            self._step_waiting()

    def _watch(self) -> None:
        """Find the optimizer's parameters, and put hooks on parameters that are new or no longer frozen."""
        optimizer: Any = self._optimizer()
        known = {row.slot: row for row in self._rows}
        slots = dict.fromkeys(optimizer.table.refresh())
        self._rows = [known.pop(slot) if slot in known else _Row(slot) for slot in slots]
        _unhook(known.values())
        for place, row in enumerate(self._rows):
            row.place = place
            if row.hook is None and row.slot.param.requires_grad:
                hook = partial(_arrive, weakref.ref(self), weakref.ref(row))
                row.hook = row.slot.param.register_post_accumulate_grad_hook(hook)

    @torch.no_grad()
    def _step_waiting(self) -> None:
        """Step the waiting parameters, and free their gradients."""
        optimizer: Any = self._optimizer()
        # A pass inside another pass, as in reentrant checkpoints, may add to a gradient that waits.
        waiting = [row for row in dict.fromkeys(self._waiting) if row.slot.param.grad is not None]
        self._waiting, self._bytes = [], 0
        if not waiting or optimizer is None:
            return
        inverse = self._inverse_scale(waiting[0].slot.param.device)
        groups: dict[int, list[_Row]] = {}
        for row in waiting:
            row.stepped = True
            groups.setdefault(row.slot.group, []).append(row)
        self.stepped += len(waiting)
        taken = []
        for index, members in groups.items():
            group, first = optimizer.param_groups[index], members[0]
            params, places = [row.slot.param for row in members], [row.place for row in members]
            first.rows = optimizer._rows_of(first.rows, group, params, places)
            taken.append((group, first.rows))
            if self._found is not None:
                for rows in first.rows.rows:
                    rows.squared_norms(self._found)
        optimizer._take(taken, inverse, self._found)
        for row in waiting:
            row.slot.param.grad = None

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
