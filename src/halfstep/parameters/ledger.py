"""The gradients of one optimizer's parameters: the states of ``p.grad`` and their transitions.

::

           a backward pass             finish                  zero_grad
    none ------------------> scaled ------------> ready ------------------> none
                                                  |   ^
                                            begin |   | finish adds the saved gradient to the new gradient;
                                                  v   | restore, after an error, puts the saved gradient back
                                                  saved

- **none**: ``p.grad`` is None.
- **scaled**: backward passes computed it, multiplied by the loss scale. It stays scaled until the ``scale_loss`` block
  ends, or until a ``GradScaler`` unscales it.
- **ready**: the step can use it. The gradient of a 16-bit parameter with a master is then fp32, with one exception:
  the gradient of a single pass in a block without a loss scale stays in the bfloat16 that the pass computed
  (``Slot.narrow``), because fp32 would only double its bytes. Code that accumulates into it, clips it, or reads it as
  the gradient of a master must make it fp32 first. The engine does so before each backward pass (``before_pass``),
  because torch accumulates in the dtype of the existing gradient.
- **saved**: set aside while a block is open, so that ``p.grad`` holds only the gradient of the pass in the block.

Autograd delivers gradients in the dtype ``p.grad_dtype``. It is fp32 for a parameter with a master, so that passes
without a block accumulate in fp32. In a block with a loss scale it is the dtype in which the pass computes, because
unscaling makes the gradient fp32 afterwards. The same holds in a block without a loss scale, for parameters that the
pass uses once (``uses``). Under DistributedDataParallel and FSDP2 it is the parameter's own dtype, which their buckets
require. Every pass sets it anew, so no pass depends on how user code cleared gradients before it: a block sets it when
it opens and closes, a wrapper at the beginning of each backward pass (``ddp_hook``), and the engine before a pass
without a block, if earlier blocks left gradients in bfloat16.

Before torch 2.13 there is no ``Tensor.grad_dtype``, and the gradient of a 16-bit parameter cannot be fp32. There, fp32
gradients are kept outside ``p.grad``, which holds a rounded copy, the image. If user code changes the image, for
example by clipping over ``model.parameters()``, the image becomes the gradient, and the lower bits are lost.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ..core.dtypes import HALF_DTYPES, is_half
from ..kernels import multi_tensor
from ..kernels.shards import local
from ..torch_internals.torch_compat import (
    HAS_GRAD_DTYPE,
    ImperativeEngine,
    backward_pass_id,
    is_view,
    replace_engine,
)
from .table import OptimizerTable, Slot, record_of, reduced_params
from .unscale import Unscaler, reciprocal, widened
from .uses import uses

__all__ = ["Gradients", "WatchedEngine", "get_grads", "set_grads", "widen"]


class _Image(NamedTuple):
    """An fp32 gradient before torch 2.13, its rounded image in ``p.grad``, and the version of the image."""

    wide: torch.Tensor
    narrow: torch.Tensor
    version: int


def get_grads(params: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return the gradients of parameters, in fp32 if an image stands in ``p.grad``."""
    grads = [p.grad for p in params]
    if not HAS_GRAD_DTYPE:
        for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
            image = record_of(param).image
            if image is not None and grad is image.narrow and grad._version == image.version:
                grads[i] = image.wide
    return grads


def set_grads(params: Iterable[torch.Tensor], grads: Iterable[torch.Tensor]) -> None:
    """Set the gradients of parameters, which may have another dtype than the parameters."""
    params = list(params)
    reduced = set(map(id, reduced_params(params)))
    for param, grad in zip(params, grads, strict=True):
        if HAS_GRAD_DTYPE and param.grad_dtype is not grad.dtype:
            param.grad = None
            # Wrappers and shards require gradients of the parameter's dtype, and set `grad_dtype` when a pass begins.
            # For other parameters, later passes must deliver this dtype, even if user code clears the gradient.
            param.grad_dtype = None if id(param) in reduced else grad.dtype
        if HAS_GRAD_DTYPE or grad.dtype is param.dtype:
            param.grad = grad
        else:
            param.grad = narrow = grad.to(param.dtype)
            record_of(param).image = _Image(grad, narrow, narrow._version)


@torch.no_grad()
def widen(params: Sequence[torch.Tensor]) -> None:
    """Convert 16-bit gradients of these parameters to fp32, one by one, so that each old gradient is freed at once."""
    half = [p for p, g in zip(params, get_grads(params), strict=True) if g is not None and g.dtype in HALF_DTYPES]
    set_grads(half, (p.grad.float() for p in half))  # type: ignore[union-attr]


_OPEN: weakref.WeakSet[Gradients] = weakref.WeakSet()
"""The ``Gradients`` between ``begin`` and ``finish`` or ``forget``. Without them, no gradient is set aside."""


def _owned() -> set[int]:
    """Return the identities of the parameters whose gradients an open block handles.

    Optimizers may share a parameter, and only one of them may unscale its gradient: the first that opened a block. If
    an interrupt prevented the block's exit, the block is freed, and other optimizers may handle the parameter.
    """
    return {id(slot.param) for each in _OPEN if each._block() is not None for slot in each._rows}


class Gradients:
    """The gradients of one optimizer's parameters.

    Args:
        table: the parameters.

    Attributes:
        table: as given.
        has_saved: True if ``begin`` set gradients aside for the open block.
    """

    def __init__(self, table: OptimizerTable) -> None:
        self.table = table
        self._rows: list[Slot] = []  # the rows whose gradients this optimizer handles in the open pass
        self._block: Any = None  # a weak reference to the block that is open, or was open last
        self._generation = -1  # the generation of the table in `begin`; -1 while no pass is open
        self._ready_for = -1  # the generation for which `grad_dtype` suits passes without a block; -1 if unknown
        self.has_saved = False
        self._pending: list[Slot] = []  # the rows without a gradient in `p.grad` when the block opened
        self._unscaler = Unscaler()

    # ---- around a backward pass

    def begin(
        self, scale: torch.Tensor | None, block: Any, in_place: Callable[[list[Slot]], list[Slot]] | None = None
    ) -> None:
        """Set aside the gradients in ``p.grad``, so that it holds only the gradients of the next pass.

        If optimizers share a parameter, the first optimizer in the block handles its gradient.

        Args:
            scale: the loss scale of the pass. With None nothing is set aside, unless gradients become fp32.
            block: the block to open, referenced weakly. The pass begins from its attribute ``loss``, if it has one.
            in_place: a function that returns the rows whose gradients stay in ``p.grad``, multiplied by ``scale``,
                because the pass accumulates into them; None if there are no such rows.
        """
        owned = _owned() if _OPEN else ()
        self._rows = [s for s in self.table.slots if id(s.param) not in owned] if owned else self.table.slots
        self._block = weakref.ref(block)
        self._generation, self._ready_for = self.table.generation, -1
        _OPEN.add(self)
        if scale is None and not self.table.has_masters:
            return
        if scale is None and hasattr(block, "loss") and None in [slot.narrow for slot in self._rows]:
            self.table.find_narrow(uses([block.loss]))
            NARROW.add(self)
            weakref.finalize(self, replace_engine, _watched).atexit = False
            replace_engine(_watched)
        there = [slot for slot in self._rows if slot.param.grad is not None]
        if there and in_place is not None:
            accumulated = in_place(there)
            if scale is not None:
                self.multiply([slot.param for slot in accumulated], scale)
            ids = set(map(id, accumulated))
            there = [slot for slot in there if id(slot) not in ids]
        self.has_saved = bool(there)
        if there:
            for slot, grad in zip(there, get_grads([slot.param for slot in there]), strict=True):
                assert grad is not None
                # A view may be a part of a DDP bucket, which the pass overwrites.
                slot.grad.saved = grad.clone() if is_view(grad) and grad.dtype is slot.param.dtype else grad
        # Save all gradients before the first `p.grad = None`, so that `restore` works after an interrupt at any line.
        self._pending = [s for s in self._rows if s.param.grad is None or s.grad.saved is not None]
        for slot in there:
            slot.param.grad = None
        self.expect(self._pending, block=True, scaled=scale is not None)

    def expect(self, slots: Iterable[Slot] | None = None, *, block: bool = False, scaled: bool = False) -> None:
        """Set ``grad_dtype`` of the parameters without gradients, for the next pass.

        Args:
            slots: rows of the table; None for all.
            block: True if the pass has a block, so that ``narrow`` gradients keep the dtype in which it computes.
            scaled: True if all gradients keep the dtype in which the pass computes, because ``finish`` makes them fp32.
        """
        if not HAS_GRAD_DTYPE or not self.table.has_masters:
            return
        for slot in self.table.refresh() if slots is None else slots:
            param = slot.param
            if param.grad is None:
                dtype = None if scaled or (block and slot.narrow) else torch.float32
                param.grad_dtype = dtype if slot.fp32 and not slot.reduced else param.dtype

    def before_pass(self, roots: Sequence[Any], *, inside: bool) -> None:
        """Convert bfloat16 gradients into which a pass will accumulate to fp32, and request fp32 from passes without a
        block.

        Args:
            roots: the tensors from which the pass begins.
            inside: True for a pass inside another pass, as in reentrant checkpoints. Both passes may compute a gradient
                of the same parameter, in any order, so these gradients must be fp32.
        """
        rows = [slot for slot in self.table.slots if slot.narrow]
        if there := [s.param for s in rows if (grad := s.param.grad) is not None and grad.dtype is torch.bfloat16]:
            reached = uses(roots)
            widen([param for param in there if id(param) in reached])
        in_block = self._rows is self.table.slots and self._block() is not None  # a block that handles all rows
        if inside or not in_block:
            owned = () if inside else _owned()
            self.expect([slot for slot in rows if id(slot.param) not in owned])

    @torch.no_grad()
    def multiply(self, params: Iterable[torch.Tensor], scale: torch.Tensor) -> None:
        """Multiply the existing gradients by a 0-dim tensor, in place."""
        there = [p for p in params if p.grad is not None]
        for param, grad in zip(there, get_grads(there), strict=True):
            factor = scale.to(param.device, non_blocking=True)
            if grad is param.grad:
                local(grad).mul_(factor)  # type: ignore[arg-type]
            else:
                set_grads([param], [grad * factor])  # type: ignore[operator]

    def arrived(self) -> bool:
        """True if the pass in the open block computed a gradient of a parameter whose ``p.grad`` was None."""
        return any(slot.param.grad is not None for slot in self._pending)

    def restore(self) -> None:
        """Drop the gradients of a failed pass, and put back the gradients that ``begin`` set aside."""
        for slot in self._pending:
            slot.param.grad = None
            if slot.grad.saved is not None:
                set_grads([slot.param], [slot.grad.saved])
        self.forget()

    def forget(self) -> None:
        """Drop the saved gradients, and let other optimizers handle the parameters."""
        for slot in self._rows:
            slot.grad.saved = None
        self._rows, self._pending, self.has_saved, self._generation = [], [], False, -1
        _OPEN.discard(self)

    def finish(self, scale: torch.Tensor | None, found_inf: torch.Tensor, done: Collection[int] = ()) -> None:
        """Unscale the new gradients, and add the gradients that ``begin`` set aside.

        Without ``begin``, the call handles all parameters except parameters in an open block of another optimizer.

        Args:
            scale: the loss scale of the gradients, a 0-dim float32 tensor; None if they are not scaled.
            found_inf: 0-dim float32 tensor, set to 1.0 if a new gradient holds inf or NaN. Without a scale, no gradient
                is checked.
            done: identities of parameters to leave alone; only without ``begin``.
        """
        rows = self._rows
        if self._generation != self.table.generation:  # no ``begin``, or user code added parameters after it
            taken = {*done, *_owned(), *(id(slot.param) for slot in rows)} if _OPEN or done else ()
            rows = rows + [s for s in self.table.slots if id(s.param) not in taken] if taken else self.table.slots
        params = self.table.params if rows is self.table.slots else [slot.param for slot in rows]
        inv_scale, half = None if scale is None else reciprocal(scale), rows if self.table.has_masters else []
        narrow = [s for s in half if s.fp32 and (g := s.param.grad) is not None and g.dtype in HALF_DTYPES]
        if narrow and inv_scale is None:
            # Sparse gradients may have duplicate indices, which must be summed in fp32.
            narrow = [s for s in narrow if not s.narrow or s.grad.saved is not None or s.param.grad.is_sparse]  # type: ignore[union-attr]
        if narrow:
            self._unscale_into(narrow, narrow if inv_scale is None else rows, inv_scale, found_inf)
        elif inv_scale is not None:
            self._unscaler.unscale(self._unscaler.gather(params), inv_scale, found_inf)
        if self.has_saved:
            self._add_saved([slot for slot in rows if slot.grad.saved is not None])
        if without := [slot for slot in self._pending if slot.param.grad is None]:
            self.expect(without)
        if self._pending and not self.table.reduces:
            self._ready_for = self.table.generation
        self._rows, self._pending, self.has_saved, self._generation = [], [], False, -1
        _OPEN.discard(self)

    @torch.no_grad()
    def _unscale_into(
        self, narrow: list[Slot], rows: list[Slot], inv_scale: torch.Tensor | None, found_inf: torch.Tensor
    ) -> None:
        """Unscale gradients, and convert the gradients of ``narrow`` to fp32, including the sum with saved gradients.

        Args:
            narrow: the rows whose 16-bit gradients become fp32.
            rows: all rows whose gradients are unscaled; ``narrow`` if the gradients are not scaled.
            inv_scale: 0-dim float32 tensor; None if the gradients are not scaled.
            found_inf: as in ``finish``.
        """
        again: list[Slot] = []
        first: dict[int, torch.Tensor] = {}
        for slot in narrow:
            if slot.param.grad.is_sparse:  # type: ignore[union-attr]
                # Sum duplicate indices in fp32, where they cannot overflow.
                set_grads([slot.param], [slot.param.grad.float().coalesce()])  # type: ignore[union-attr]
            elif slot.grad.saved is not None and not slot.grad.saved.is_sparse:
                again.append(slot)
            else:
                first[id(slot.param)] = slot.param
        if again:
            owners = [slot.param for slot in again]
            grads: list[torch.Tensor] = [param.grad for param in owners]  # type: ignore[misc]
            sums = [slot.grad.saved.float() for slot in again]  # type: ignore[union-attr]
            groups = self._unscaler.get("again", owners, grads, sums)
            multi_tensor.unscale_into(grads, sums, inv_scale, found_inf, accumulate=True, groups=groups)
            set_grads(owners, sums)
            for slot in again:
                slot.grad.saved = None
        done = set(map(id, again))
        params = [s.param for s in rows if s.param.grad is not None and id(s) not in done]
        if params:
            grads = self._unscaler.gather(params)
            targets = [
                torch.empty_like(grad, dtype=torch.float32) if id(param) in first else grad
                for param, grad in zip(params, grads, strict=True)
            ]
            groups = self._unscaler.get("first", params, grads, targets)
            multi_tensor.unscale_into(grads, targets, inv_scale, found_inf, accumulate=False, groups=groups)
            set_grads(first.values(), [t for param, t in zip(params, targets, strict=True) if id(param) in first])

    @torch.no_grad()
    def _add_saved(self, rows: Sequence[Slot]) -> None:
        for slot, grad in zip(rows, get_grads([slot.param for slot in rows]), strict=True):
            param, before, slot.grad.saved = slot.param, slot.grad.saved, None
            assert before is not None
            if grad is None:
                set_grads([param], [before])
            elif grad.is_sparse or before.is_sparse or grad.dtype is not before.dtype:
                # torch cannot add 16-bit sparse tensors, nor a dense tensor to a sparse tensor
                first, second = (grad, before) if before.is_sparse else (before, grad)
                total = widened(first) + widened(second)
                set_grads([param], [total if slot.fp32 else total.to(before.dtype)])
            else:
                grad.add_(before)

    # ---- between passes and step

    @torch.no_grad()
    def clear_overflow(self) -> torch.Tensor | None:
        """Set all gradients to zero if a gradient holds inf or NaN, without reading the device.

        Returns:
            0-dim float32 tensor, 1.0 if a gradient holds inf or NaN; None if there are no gradients.
        """
        grads = self._unscaler.gather(self.table.params)
        if not grads:
            return None
        found_inf = torch.zeros((), dtype=torch.float32, device=grads[0].device)
        self._unscaler.unscale(grads, torch.ones_like(found_inf), found_inf, groups_of="check")
        for grad in map(local, grads):
            grad.masked_fill_((found_inf != 0).to(grad.device, non_blocking=True), 0.0)
        return found_inf

    def unscale_or_check(self, scale: torch.Tensor, found_inf: torch.Tensor, *, step_checks: bool) -> bool:
        """Unscale gradients in place, or leave that to the step if a gradient has 16 bits.

        In the second case, check the gradients for inf and NaN, unless the step does (``step_checks``).

        Returns:
            True if the step must unscale, which it does in fp32.
        """
        if step_checks and any(p.grad is not None and is_half(p.grad) for p in self.table.params):
            return True
        grads = self._unscaler.gather(self.table.params)
        left = any(grad.dtype in HALF_DTYPES for grad in grads)
        self._unscaler.unscale(grads, torch.ones_like(scale) if left else reciprocal(scale), found_inf)
        return left

    def widen(self) -> None:
        """Convert the gradients of parameters with masters to fp32."""
        widen([slot.param for slot in self.table.slots if slot.fp32])

    def clip(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip unscaled gradients to a total norm; see ``Unscaler.clip``."""
        self.widen()
        return self._unscaler.clip(self.table.params, max_norm, norm_type)

    def unscale_and_clip(
        self, params: Sequence[torch.Tensor], scale: torch.Tensor, found_inf: torch.Tensor, max_norm: float
    ) -> torch.Tensor:
        """Unscale and clip to a 2-norm with one read of the gradients, and return the norm before clipping."""
        return self._unscaler.unscale_and_clip(self._unscaler.gather(params), reciprocal(scale), found_inf, max_norm)

    def clear(self) -> None:
        """Drop saved gradients after ``zero_grad`` set ``p.grad`` to None or zero, possibly in an open block."""
        for slot in self._rows:
            slot.grad.saved = None
        self._pending = []
        slots = self.table.refresh() if self.table.has_masters else []
        if not slots or self._ready_for == self.table.generation:
            return
        for slot in slots:
            grad = slot.param.grad
            if slot.fp32 and slot.reduced and grad is not None and grad.dtype is not slot.param.dtype:
                # A wrapper requires gradients of the parameter's dtype, even if they are zero.
                set_grads([slot.param], [torch.zeros_like(slot.param)])
        self.expect(slots)
        if not (self._rows or self.table.reduces):
            self._ready_for = self.table.generation


NARROW: weakref.WeakSet[Gradients] = weakref.WeakSet()
"""The ``Gradients`` of optimizers for which blocks leave gradients in bfloat16."""


class WatchedEngine(ImperativeEngine):
    """A wrapper of torch's autograd engine that makes gradients fp32 before a pass accumulates into them.

    Every backward pass that Python starts calls the engine: ``Tensor.backward``, ``torch.autograd.backward`` in
    reentrant checkpoints, compiled autograd, and pipeline schedules that call ``Variable._execution_engine`` directly.
    Passes that C++ or TorchScript starts do not call it.

    Attributes:
        watched: the engine that runs the passes.
    """

    def __init__(self, watched: Any) -> None:
        self.watched = watched

    def run_backward(self, tensors: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass."""
        if kwargs.get("accumulate_grad") or args[5:6] == (True,):
            for gradients in list(NARROW):
                gradients.before_pass(tensors, inside=backward_pass_id() != -1)
        return self.watched.run_backward(tensors, *args, **kwargs)


def _watched(engine: Any) -> Any:
    """Return the engine for backward passes: a ``WatchedEngine`` while blocks leave gradients in bfloat16."""
    live, watches = list(NARROW), isinstance(engine, WatchedEngine)
    if live and not watches:
        return WatchedEngine(engine)
    return engine.watched if watches and not live else engine
