"""Gradient release: parameters step inside of the backward pass, and their gradients are freed at once.

This file decides when parameters step, and by what their gradients are multiplied then. ``base`` has the step itself.
The code that runs a scaled backward pass calls ``begin``, ``finish`` and ``abandon``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from ..core.errors import UsageError
from ..core.scalars import in_scalar_dtype
from ..core.torch_compat import backward_pass_id, found_inf_of, queue_after_backward, scale_of, tensor_hooks
from ..gradients.ledger import Gradients
from ..gradients.table import REDUCTIONS
from ..kernels.tensor_table import Number
from .param_rows import GroupRows, ParamRows
from .release_checks import check, refuse_closure, refuse_gradient, refuse_ranks, refuse_second

__all__ = ["GradientRelease", "release_of"]

_BUCKET = 2**22  # elements: smaller parameters wait for each other, so that one launch steps them all


class _Block(NamedTuple):
    """The ``scale_loss`` block that is open.

    Attributes:
        scale: by what gradients of the pass are to be divided; None if they are not scaled.
        gradients: what was set aside before the pass.
        adds: whether anything was.
        delays: whether the parameters wait for the gradients of a later pass.
        before: how many parameters had stepped when it was opened.
    """

    scale: torch.Tensor | None
    gradients: Gradients
    adds: bool
    delays: bool
    before: int


def release_of(optimizer: object) -> GradientRelease | None:
    """The gradient release of an optimizer, if it has one."""
    found = getattr(optimizer, "release", None)
    return found if isinstance(found, GradientRelease) else None


def _arrive(release: weakref.ref[GradientRelease], param: torch.Tensor) -> None:
    """The hook on a parameter. It has no effect once the optimizer is gone."""
    alive = release()
    if alive is not None:
        alive.arrive(param)


def _is_released(param: torch.Tensor) -> bool:
    """Whether a parameter has the hook of an optimizer that is alive."""
    hooks = [hook for hook in tensor_hooks(param) if isinstance(hook, partial) and hook.func is _arrive]
    return any(hook.args[0]() is not None for hook in hooks)


class GradientRelease:
    """The gradient release of an optimizer, which ``FusedOptimizer.attach`` returns.

    Args:
        optimizer: a fused one. This must not outlive it.
        scaler: the ``GradScaler`` that scales the losses; None if none does.

    Attributes:
        scaler: as given, if it is enabled.
        guard: called before a gradient is used; raises an error if it must not be.
    """

    def __init__(self, optimizer: Any, scaler: torch.amp.GradScaler | None = None) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.guard: Callable[[], None] | None = None
        self._hooks: dict[int, Any] = {}  # by the identity of the parameter
        self._places: dict[int, tuple[int, int]] = {}  # the group of each parameter, and its place in the optimizer
        self._rows: dict[tuple[int, int], GroupRows] = {}  # by group and the identity of the first parameter
        self._queued = -1  # the backward pass at whose end those that wait are to step
        self._keeps = False
        self._block: _Block | None = None
        self._kept = False  # whether a scaled pass has left its gradients to a later one
        self._last: torch.Tensor | None = None  # square of the norm of the last gradients that were finite; 0 for none
        self.forget()

    # ---- what a user calls

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward passes within this block keep their gradients, and nothing steps.

        The next pass outside of it adds its own gradients and steps. If there is none, ``optimizer.step()`` does it.
        """
        before, self._keeps = self._keeps, True
        try:
            yield
        finally:
            self._keeps = before

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
        if self._total is not None:
            optimizer.grad_norm = self._total.sqrt().float()
            before = torch.zeros_like(self._total) if self._last is None else self._last
            self._last = self._total.where(self._total.isfinite(), before)
        if self.scaler is not None and self._found is not None:
            found = self._found.to(optimizer.param_groups[0]["params"][0].device)
            flags = found_inf_of(self.scaler, optimizer)
            flags[found.device] = torch.maximum(found, flags.get(found.device, found))
            if hasattr(optimizer, "found_inf"):
                optimizer.found_inf = flags[found.device]
        kept = self._kept
        self.forget()
        self._kept = kept  # those of a step that was skipped are there until zero_grad

    def forget(self) -> None:
        """Begin a step anew."""
        self._waiting: dict[int, torch.Tensor] = {}  # have a gradient, and step soon
        self._elements = 0
        self._stepped: set[int] = set()
        self._found: torch.Tensor | None = None  # 1.0 once a gradient of this pass was inf or NaN
        self._skip: torch.Tensor | None = None  # 1.0 once one was to be used, from this pass or set aside before
        self._kept = False
        self._total: torch.Tensor | None = None  # sum of squares of this step's gradients so far

    # ---- what a face calls

    @property
    def has_stepped(self) -> bool:
        """Whether any parameter has stepped since ``step()`` was called."""
        return bool(self._stepped)

    def begin(self, gradients: Gradients, scale: torch.Tensor | None, *, delay: bool) -> None:
        """A ``scale_loss`` block was opened; see ``_Block``."""
        self._block = _Block(scale, gradients, gradients.has_saved, delay, len(self._stepped))
        self._found = self._skip = None

    def finish(self, found_inf: torch.Tensor) -> bool:
        """The block was left. Adds its overflow to ``found_inf``; returns whether any parameter stepped in it."""
        block, self._block, self.guard = self._block, None, None
        self.add_overflow(found_inf)
        used = len(self._stepped) > (0 if block is None else block.before)
        if block is not None and block.scale is not None and not used:
            self._kept = True
        return used

    def abandon(self) -> None:
        """The pass in the block failed. What has stepped has stepped."""
        self._block = self.guard = self._found = self._skip = None
        self._waiting, self._elements = {}, 0

    def add_overflow(self, found_inf: torch.Tensor) -> None:
        """Set ``found_inf`` to 1.0 if a gradient was inf or NaN."""
        if self._found is not None:
            found_inf.logical_or_(self._found.to(found_inf.device, non_blocking=True))

    def refuse_block(self) -> None:
        """Refuse a ``scale_loss`` block beside a scaler.

        Raises:
            UsageError: if ``attach`` was given a scaler.
        """
        if self.scaler is not None:
            raise UsageError(
                "attach() was given a GradScaler, and now there is a scale_loss block, too; use one of them."
            )

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
                "clip, give max_grad_norm= to the optimizer."
            )

    # ---- in a backward pass

    def arrive(self, param: torch.Tensor) -> None:
        """The gradient of a parameter is complete.

        Raises:
            UsageError: if it cannot be used now.
        """
        if self._keeps or (self._block is not None and self._block.delays):
            return
        if not self._waiting and not self._stepped:
            self._watch()  # the groups may have changed since the last step
        if id(param) not in self._places:
            return
        if self.guard is not None:
            self.guard()
        if REDUCTIONS:
            refuse_ranks([param])
        if id(param) in self._stepped:
            refuse_second(param)
        refuse_gradient(param)
        self._waiting[id(param)] = param
        self._elements += param.numel()
        if self._queued != (running := backward_pass_id()):
            self._queued = running
            queue_after_backward(self._step_waiting)
        if self._elements >= _BUCKET:
            self._step_waiting()

    def _watch(self) -> None:
        """Learn which parameters there are, and put hooks on those that are new or no longer frozen."""
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
        self._waiting, self._elements = {}, 0
        if not params or optimizer is None:
            return
        scale = self._finish_gradients(params)
        self._stepped.update(map(id, params))
        places = [self._places[id(param)] for param in params]
        taken = []
        groups: dict[int, list[int]] = {}
        for i, (group, _) in enumerate(places):
            groups.setdefault(group, []).append(i)
        for index, found in groups.items():
            members, its = [params[i] for i in found], [places[i][1] for i in found]
            key = index, id(members[0])
            hyper, rows = optimizer._rows_of(self._rows.get(key), optimizer.param_groups[index], members, its)
            self._rows[key] = rows
            taken.append((hyper, rows))
        all_rows = [rows for _, group_rows in taken for rows in group_rows.rows]
        optimizer._take(taken, self._factor(optimizer.options.max_grad_norm, all_rows, scale), self._skip)
        for param in params:
            param.grad = None

    def _finish_gradients(self, params: list[torch.Tensor]) -> torch.Tensor | None:
        """Add what was set aside. Returns by what gradients are still to be divided, or None."""
        block = self._block
        scale = None if block is None else block.scale
        if self.scaler is not None:
            scale = scale_of(self.scaler)
            if scale is None:
                raise UsageError("No loss has been scaled; call scaler.scale(loss).backward().")
        zero = torch.zeros((), dtype=torch.float32, device=params[0].device)
        if scale is not None and self._found is None:
            self._found = zero
        adds = block is not None and block.adds
        if self._skip is None and (scale is not None or self._kept):
            self._skip = torch.zeros_like(zero) if adds or self._found is None else self._found
        if block is None or not adds:
            return scale
        block.gradients.finish(scale, zero if self._found is None else self._found, params)
        return None

    def _factor(self, limit: float | None, rows: list[ParamRows], scale: torch.Tensor | None) -> Number:
        """The factor of the gradients. Looks for inf and NaN with the same read that gives their norm."""
        inverse: Number = 1.0
        if scale is not None:
            inverse = in_scalar_dtype(scale.to(rows[0].device, non_blocking=True)).reshape(()).reciprocal()
        if limit is None and self._skip is None:
            return inverse
        squares = torch.stack([one.squared_norms(self._skip).sum() for one in rows]).sum() * inverse * inverse
        if limit is None:
            return inverse
        self._total = squares if self._total is None else self._total + squares
        known = self._total if self._last is None else torch.maximum(self._total, self._last)
        return inverse * (limit / (known.sqrt() + 1e-6)).clamp(max=1.0)
