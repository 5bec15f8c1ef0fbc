"""The gradients of one optimizer's parameters: which states ``p.grad`` goes through, and what moves it on.

::

           a backward pass             finish                  zero_grad
    none ------------------> scaled ------------> ready ------------------> none
                                                  |   ^
                                            begin |   | finish adds what the pass brought to what was saved;
                                                  v   | restore, after an error, puts it back as it was
                                                  saved

- **none**: ``p.grad`` is None.
- **scaled**: brought by backward passes and multiplied by the loss scale. So it is inside of a ``scale_loss`` block,
  and until a ``GradScaler`` unscales.
- **ready**: what the step will use. The gradient of a 16-bit parameter with a master is fp32 then, so that a user may
  take its norm and clip it: in 16 bits torch's ``clip_grad_norm_`` rounds the norm, and overflows in float16. It may
  stay in 16 bits (``narrow``) where the user has said that no code clips by hand.
- **saved**: set aside while a block is open, so that the pass in the block brings only its own gradient.

The dtype in which autograd delivers a gradient is ``p.grad_dtype``. It is fp32 for a parameter with a master, so that
plain backward passes add up in fp32. In a block that scales it is the dtype that the pass computes in, because the
gradient is unscaled afterwards. Under DistributedDataParallel and FSDP2 it is the parameter's own dtype, because their
buckets take nothing else. A block sets it when it begins and when it ends, and a wrapper at the beginning of each
backward pass (``ddp_hook``), so no pass depends on how gradients were cleared before it.

Before torch 2.13 there is no ``Tensor.grad_dtype``, and the gradient of a 16-bit parameter cannot be fp32. There the
fp32 gradient is kept beside ``p.grad``, which is its rounded image. If a user changes the image, for example by
clipping over ``model.parameters()``, the image becomes the gradient, and the other bits are lost.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import torch

from ..core.dtypes import HALF_DTYPES, is_half
from ..kernels import multi_tensor
from ..kernels.shards import local
from ..torch_internals.torch_compat import HAS_GRAD_DTYPE, is_view
from .table import OptimizerTable, Slot, record_of, reduced_params
from .unscale import Unscaler, reciprocal, widened

__all__ = ["Gradients", "get_grads", "set_grads", "widen"]


class _Image(NamedTuple):
    """Before torch 2.13: an fp32 gradient, its rounded image in ``p.grad``, and the version of the image then."""

    wide: torch.Tensor
    narrow: torch.Tensor
    version: int


def get_grads(params: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """The gradients of parameters."""
    grads = [p.grad for p in params]
    if not HAS_GRAD_DTYPE:
        for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
            image = record_of(param).image
            if image is not None and grad is image.narrow and grad._version == image.version:
                grads[i] = image.wide
    return grads


def set_grads(params: Iterable[torch.Tensor], grads: Iterable[torch.Tensor]) -> None:
    """Give parameters gradients, which may have another dtype than the parameters."""
    params = list(params)
    reduced = set(map(id, reduced_params(params)))
    for param, grad in zip(params, grads, strict=True):
        if HAS_GRAD_DTYPE:
            if param.grad_dtype is not grad.dtype:
                param.grad = None
                # Wrappers and shards take gradients of the parameter's dtype alone, and set it when a pass begins. For
                # any other parameter later passes deliver the dtype that is there now, however gradients are cleared.
                param.grad_dtype = None if id(param) in reduced else grad.dtype
            param.grad = grad
        elif grad.dtype is param.dtype:
            param.grad = grad
        else:
            param.grad = narrow = grad.to(param.dtype)
            record_of(param).image = _Image(grad, narrow, narrow._version)


@torch.no_grad()
def widen(params: Sequence[torch.Tensor]) -> None:
    """Make 16-bit gradients of these parameters fp32."""
    half = [p for p, g in zip(params, get_grads(params), strict=True) if g is not None and g.dtype in HALF_DTYPES]
    set_grads(half, [p.grad.float() for p in half])  # type: ignore[union-attr]


class Gradients:
    """The gradients of one optimizer's parameters.

    Args:
        table: the parameters.
        narrow: True if a gradient that is to be fp32 may stay in 16 bits until the step when it is neither scaled nor
            added to another.

    Attributes:
        table, narrow: as given.
        has_saved: True if gradients were set aside when the open block was opened.
    """

    def __init__(self, table: OptimizerTable, *, narrow: bool = False) -> None:
        self.table = table
        self.narrow = narrow
        self._rows: list[Slot] = []  # what this optimizer has taken for the open pass
        self._generation = -1  # of the table then; -1 while no pass is open
        self._ready_for = -1  # the generation in which plain passes deliver what they should; -1 while they may not
        self.has_saved = False
        self._pending: list[Slot] = []  # had no gradient in their place when the block was opened
        self._unscaler = Unscaler()

    # ---- around a backward pass

    def begin(
        self, scale: torch.Tensor | None, block: object, in_place: Callable[[list[Slot]], list[Slot]] | None = None
    ) -> None:
        """Set aside the present gradients, so that a pass scaled by ``scale`` brings only its own.

        A parameter that another optimizer has taken for this pass is left to that optimizer.

        Args:
            scale: by what the gradients of the pass are to be divided. With None nothing is set aside, unless
                gradients are to become fp32.
            block: the block that is opened; not kept alive.
            in_place: picks the rows whose gradients stay in place, multiplied by ``scale``, because they are averaged
                there with what the pass brings; None if there are none.
        """
        self._rows = [s for s in self.table.slots if s.grad.block is None or s.grad.block() is None]
        self._generation, self._ready_for = self.table.generation, -1
        ref = weakref.ref(block)
        for slot in self._rows:
            slot.grad.block = ref
        if scale is None and not self.table.fp32_grads:
            self._pending, self.has_saved = [], False
            return
        there = [slot for slot in self._rows if slot.param.grad is not None]
        if there and in_place is not None:
            staying = in_place(there)
            if scale is not None:
                self.multiply([slot.param for slot in staying], scale)
            stays = set(map(id, staying))
            there = [slot for slot in there if id(slot) not in stays]
        self.has_saved = bool(there)
        if there:
            for slot, grad in zip(there, get_grads([slot.param for slot in there]), strict=True):
                assert grad is not None
                # A view may lie in a bucket of DistributedDataParallel, which the pass overwrites.
                copied = is_view(grad) and grad.dtype is slot.param.dtype
                slot.grad.saved = grad.clone() if copied else grad
        # All are saved before the first is taken away, so that an interrupt anywhere leaves what `restore` needs.
        self._pending = [s for s in self._rows if s.param.grad is None or s.grad.saved is not None]
        for slot in there:
            slot.param.grad = None
        self.expect(self._pending, as_computed=scale is not None or self.narrow)

    def expect(self, slots: Iterable[Slot] | None = None, *, as_computed: bool = False) -> None:
        """Choose the dtype in which the next pass delivers gradients to the parameters that have none.

        Args:
            slots: rows of the table; None for all.
            as_computed: leave it to the pass, because the gradients become fp32, or are used up, before user code can
                see them.
        """
        if not HAS_GRAD_DTYPE or not self.table.fp32_grads:
            return
        dtype = None if as_computed else torch.float32
        for slot in self.table.slots if slots is None else slots:
            param = slot.param
            if param.grad is None:
                chosen = dtype if slot.fp32 and not slot.reduced else param.dtype
                if param.grad_dtype is not chosen:
                    param.grad_dtype = chosen

    @torch.no_grad()
    def multiply(self, params: Iterable[torch.Tensor], scale: torch.Tensor) -> None:
        """Multiply the gradients that are there by a 0-dim tensor, in place."""
        there = [p for p in params if p.grad is not None]
        for param, grad in zip(there, get_grads(there), strict=True):
            factor = scale.to(param.device, non_blocking=True)
            if grad is param.grad:
                local(grad).mul_(factor)  # type: ignore[arg-type]
            else:
                set_grads([param], [grad * factor])  # type: ignore[operator]

    def arrived(self) -> bool:
        """True if the pass in the open block has brought a gradient to a parameter that had none."""
        return any(slot.param.grad is not None for slot in self._pending)

    def restore(self) -> None:
        """After ``begin``, when the pass failed: drop its gradients and put back the gradients that were set aside."""
        for slot in self._pending:
            slot.param.grad = None
            if slot.grad.saved is not None:
                set_grads([slot.param], [slot.grad.saved])
        self.forget()

    def forget(self) -> None:
        """Drop what is saved, and let other optimizers take the parameters."""
        for slot in self._rows:
            slot.grad.saved = slot.grad.block = None
        self._rows, self._pending, self.has_saved, self._generation = [], [], False, -1

    def finish(self, scale: torch.Tensor | None, found_inf: torch.Tensor, done: Collection[int] = ()) -> None:
        """Unscale the new gradients, and add the gradients that were set aside.

        Without ``begin`` all parameters are taken that no open block of another optimizer has.

        Args:
            scale: 0-dim float32 tensor, by which the gradients are multiplied; None if they are not.
            found_inf: 0-dim float32 tensor, set to 1.0 if a new gradient holds inf or NaN. Not looked at without scale.
            done: identities of parameters to leave alone; only without ``begin``.
        """
        if self._generation != self.table.generation:  # no ``begin``, or parameters were added after it
            mine = set(map(id, [slot.param for slot in self._rows])).union(done)
            left = [s for s in self.table.slots if id(s.param) not in mine]
            self._rows += [s for s in left if s.grad.block is None or s.grad.block() is None]
        rows = self._rows
        inv_scale = None if scale is None else reciprocal(scale)
        narrow: list[Slot] = []
        saved = bool([None for slot in rows if slot.grad.saved is not None])
        if self.table.fp32_grads and (inv_scale is not None or saved or not self.narrow):
            narrow = [s for s in rows if s.fp32 and (g := s.param.grad) is not None and g.dtype in HALF_DTYPES]
        if narrow:
            self._unscale_into(narrow, rows, inv_scale, found_inf)
        elif inv_scale is not None:
            self._unscaler.unscale(self._unscaler.gather([s.param for s in rows]), inv_scale, found_inf)
        if saved:
            self._add_saved(rows)
        if without := [slot for slot in self._pending if slot.param.grad is None]:
            self.expect(without)
        if self._pending and not (self.narrow or self.table.reduces):
            self._ready_for = self.table.generation
        for slot in rows:
            slot.grad.saved = slot.grad.block = None
        self._rows, self._pending, self.has_saved, self._generation = [], [], False, -1

    @torch.no_grad()
    def _unscale_into(
        self, narrow: list[Slot], rows: list[Slot], inv_scale: torch.Tensor | None, found_inf: torch.Tensor
    ) -> None:
        """Unscale gradients, some of them into fp32, where what was set aside is added to them.

        Args:
            narrow: the rows whose 16-bit gradients become fp32.
            rows: all rows whose gradients are unscaled.
            inv_scale: 0-dim float32 tensor; None if the gradients are not scaled.
            found_inf: as in ``finish``.
        """
        first: dict[int, torch.Tensor] = {}
        again: list[Slot] = []
        for slot in narrow:
            param, saved = slot.param, slot.grad.saved
            if param.grad.is_sparse:  # type: ignore[union-attr]
                # Coalesced in fp32, where duplicates of an index cannot overflow.
                set_grads([param], [param.grad.float().coalesce()])  # type: ignore[union-attr]
            elif saved is not None and not saved.is_sparse:
                again.append(slot)
            elif inv_scale is not None or not self.narrow:
                first[id(param)] = param
        if again:
            owners = [slot.param for slot in again]
            grads: list[torch.Tensor] = [param.grad for param in owners]  # type: ignore[misc]
            sums = [slot.grad.saved.float() for slot in again]  # type: ignore[union-attr]
            groups = self._unscaler.get("again", owners, grads, sums)
            multi_tensor.unscale_into(grads, sums, inv_scale, found_inf, accumulate=True, groups=groups)
            for slot, total in zip(again, sums, strict=True):
                slot.grad.saved = None
                set_grads([slot.param], [total])
        if inv_scale is None:
            params = list(first.values())
        else:
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
        mine = [slot for slot in rows if slot.grad.saved is not None]
        for slot, grad in zip(mine, get_grads([slot.param for slot in mine]), strict=True):
            param, before, slot.grad.saved = slot.param, slot.grad.saved, None
            assert before is not None
            if grad is None:
                set_grads([param], [before])
            elif grad.is_sparse or before.is_sparse or grad.dtype is not before.dtype:
                # torch adds no sparse tensors of 16 bits, and nothing dense to a sparse one
                first, second = (grad, before) if before.is_sparse else (before, grad)
                total = widened(first) + widened(second)
                set_grads([param], [total if slot.fp32 else total.to(before.dtype)])
            else:
                grad.add_(before)

    # ---- between passes and step

    @torch.no_grad()
    def clear_overflow(self) -> torch.Tensor | None:
        """Set the gradients that are there to zero if one of them holds inf or NaN. Reads no device.

        Returns:
            0-dim float32 tensor, 1.0 if one does; None if there are no gradients.
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
        """Unscale gradients in place. If any has 16 bits, only look for inf and NaN, unless the step does that, too.

        Returns:
            True if unscaling is left to the step, which does it in fp32.
        """
        if step_checks and any(p.grad is not None and is_half(p.grad) for p in self.table.params):
            return True
        grads = self._unscaler.gather(self.table.params)
        left = any(grad.dtype in HALF_DTYPES for grad in grads)
        self._unscaler.unscale(grads, torch.ones_like(scale) if left else reciprocal(scale), found_inf)
        return left

    def clip(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip unscaled gradients to a total norm; see ``Unscaler.clip``."""
        widen([slot.param for slot in self.table.slots if slot.fp32])
        return self._unscaler.clip(self.table.params, max_norm, norm_type)

    def unscale_and_clip(
        self, params: Sequence[torch.Tensor], scale: torch.Tensor, found_inf: torch.Tensor, max_norm: float
    ) -> torch.Tensor:
        """Unscale and clip to a 2-norm, with one read of the gradients. Returns the norm before clipping."""
        return self._unscaler.unscale_and_clip(self._unscaler.gather(params), reciprocal(scale), found_inf, max_norm)

    def clear(self) -> None:
        """Forget saved gradients after ``p.grad`` was set to None or zero, perhaps inside of an open block."""
        for slot in self._rows:
            slot.grad.saved = None
        self._pending = []
        if self._ready_for == self.table.generation or not self.table.fp32_grads:
            return
        for slot in self.table.slots:
            grad = slot.param.grad
            if slot.fp32 and slot.reduced and grad is not None and grad.dtype is not slot.param.dtype:
                # A wrapper takes only gradients of the parameter's dtype, also if they are zeros.
                set_grads([slot.param], [torch.zeros_like(slot.param)])
        self.expect()
        if not (self._rows or self.table.reduces):
            self._ready_for = self.table.generation
