"""Gradient release: parameters step inside of the backward pass, and their gradients are freed at once.

This file decides when parameters step, and by what their gradients are multiplied then. ``base`` has the step itself.
The code that runs a scaled backward pass calls ``begin``, ``finish`` and ``abandon``. A parameter takes one gradient in
each step: a second one is an error, so no gradient is ever added to another.
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

_BUCKET = 2**23  # bytes: smaller gradients wait for each other, so that one launch steps their parameters


def release_of(optimizer: object) -> GradientRelease | None:
    """The gradient release of an optimizer; None if it has none."""
    found = getattr(optimizer, "release", None)
    return found if isinstance(found, GradientRelease) else None


def _arrive(release: weakref.ref[GradientRelease], param: torch.Tensor) -> None:
    """The hook on a parameter. It has no effect once the optimizer is gone."""
    alive = release()
    if alive is not None:
        alive.arrive(param)


def _is_released(param: torch.Tensor) -> bool:
    """True if a parameter has the hook of an optimizer that is alive."""
    hooks = [hook for hook in tensor_hooks(param) if isinstance(hook, partial) and hook.func is _arrive]
    return any(hook.args[0]() is not None for hook in hooks)


class GradientRelease:
    """The gradient release of an optimizer, which ``FusedOptimizer.attach`` returns.

    Args:
        optimizer: a fused one. This must not outlive it.
        scaler: the ``GradScaler`` that scales the losses; None if none does.

    Attributes:
        scaler: as given, if it is enabled.
    """

    def __init__(self, optimizer: Any, scaler: torch.amp.GradScaler | None = None) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._hooks: dict[int, Any] = {}  # by the identity of the parameter
        self._places: dict[int, tuple[int, int]] = {}  # the group of each parameter, and its place in the optimizer
        self._rows: dict[tuple[int, int], GroupRows] = {}  # by group and the identity of the first parameter
        self._queued = -1  # the backward pass at whose end those that wait are to step
        self._scale: torch.Tensor | None = None  # what the loss of the open block was multiplied by
        self._guard: Callable[[], None] | None = None  # raises an error if no gradient must be used now
        self._before = 0  # the number of parameters that had stepped when the block was opened
        self.forget()

    # ---- what a user calls

    def __getattr__(self, name: str) -> Any:
        raise_removed(f"optimizers.GradientRelease.{name}")
        raise AttributeError(f"GradientRelease has no attribute {name!r}.", name=name, obj=self)

    def remove(self) -> None:
        """From now on ``optimizer.step()`` is the step again, as without ``attach``."""
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
        # A plain pass adds to gradients from before, unless they are cleared. Then they are gone or not the same.
        self._left.update((id(p), weakref.ref(p.grad)) for p in model.parameters() if p.grad is not None)
        self._watch()

    def begin_step(self, closure: Any, scaler: object) -> None:
        """``step`` was called with these.

        Raises:
            UsageError: for a closure, or a scaler that ``attach`` was not given.
        """
        refuse_closure(closure)
        scaled = self._stepped and getattr(self._optimizer(), "grad_scale", None) is not None
        if scaler is not None or (scaled and self.scaler is None):
            self.refuse_other_scaler(scaler)

    def end_step(self) -> None:
        """Every parameter has stepped."""
        optimizer: Any = self._optimizer()
        if self.scaler is not None and self._found is not None:
            found = self._found.to(optimizer.param_groups[0]["params"][0].device)
            flags = found_inf_of(self.scaler, optimizer)
            flags[found.device] = torch.maximum(found, flags.get(found.device, found))
            if hasattr(optimizer, "found_inf"):
                optimizer.found_inf = flags[found.device]
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = None  # of a parameter that had no hook; the next pass must not meet it
        self.forget()

    def forget(self) -> None:
        """Begin a step anew."""
        self._waiting: dict[int, torch.Tensor] = {}  # have a gradient, and step soon
        self._bytes = 0
        self._stepped: set[int] = set()
        self._found: torch.Tensor | None = None  # 1.0 once a gradient of this pass was inf or NaN
        self._earlier: set[int] = set()  # had a gradient when the block was opened
        self._left: dict[int, Callable[[], Any]] = {}  # the gradients from before the release

    # ---- what a face calls

    @property
    def has_stepped(self) -> bool:
        """True if a parameter has stepped since ``step()`` was called."""
        return bool(self._stepped)

    def begin(
        self, params: Iterable[torch.Tensor], scale: torch.Tensor | None, guard: Callable[[], None] | None
    ) -> None:
        """Note that a ``scale_loss`` block is opened.

        Beside a ``GradScaler`` it is a block of other optimizers, and what the scaler is to hear stays.

        Args:
            params: the parameters of the optimizer, with the gradients from before the block.
            scale: by what the gradients of the pass are to be divided; None if they are not scaled.
            guard: a function that is called before a gradient is used; raises an error if it must not be used.
        """
        self._scale, self._guard, self._before = scale, guard, len(self._stepped)
        self._found = None if self.scaler is None else self._found  # a scaler's ends with the step
        self._earlier = {id(param) for param in params if param.grad is not None}

    def finish(self, found_inf: torch.Tensor) -> bool:
        """True if a parameter stepped in the block that was left, whose overflow is added to ``found_inf``."""
        self._scale = self._guard = None
        self.add_overflow(found_inf)
        return len(self._stepped) > self._before

    def abandon(self) -> None:
        """The pass in the block failed. What has stepped has stepped."""
        self._scale = self._guard = None
        self._found = None if self.scaler is None else self._found  # a scaler's ends with the step
        self._waiting, self._bytes = {}, 0

    def add_overflow(self, found_inf: torch.Tensor) -> None:
        """Set ``found_inf`` to 1.0 if a gradient was inf or NaN."""
        if self._found is not None:
            found_inf.logical_or_(self._found.to(found_inf.device, non_blocking=True))

    def refuse_other_scaler(self, scaler: object) -> None:
        """Refuse a scaler whose scale was not divided out.

        Raises:
            UsageError: unless it is the one that ``attach`` was given.
        """
        if scaler is None or scaler is not self.scaler:
            raise UsageError(
                "Parameters step inside of the backward pass, and their gradients were not divided by the scale of "
                "this GradScaler. Give it to attach: optimizer.attach(model, scaler=scaler)."
            )

    def refuse_clipping(self, name: str) -> None:
        """Refuse to clip or unscale what is gone.

        Raises:
            UsageError: if any parameter has stepped already.
        """
        if self._stepped:
            raise UsageError(
                f"{name} finds no gradients: with gradient release they were used and freed in the backward pass. To "
                "clip, end the release with remove()."
            )

    def refuse_block(self) -> None:
        """Refuse a ``scale_loss`` block beside a scaler.

        Raises:
            UsageError: if ``attach`` was given a scaler.
        """
        if self.scaler is not None:
            raise UsageError(
                "attach() was given a GradScaler, and now there is a scale_loss block, too; use one of them."
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
        """The gradient of a parameter is complete.

        Raises:
            UsageError: if it cannot be used now.
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
        """Learn which parameters there are, and put hooks on parameters that are new or no longer frozen."""
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
        """Step the parameters that wait, and free their gradients."""
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
        """Factor that multiplies the gradients of this pass. A pass that is scaled has a flag for inf and NaN, too."""
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
