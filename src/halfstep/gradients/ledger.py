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
  stay in 16 bits (``narrow``) where the user has said that nobody clips by hand.
- **saved**: set aside while a block is open, so that the pass in the block brings only its own gradient.

The dtype in which autograd delivers a gradient is ``p.grad_dtype``. It is fp32 for a parameter with a master, so that
plain backward passes add up in fp32. In a block that scales it is whatever the pass computes, because the gradient is
unscaled afterwards. Under DistributedDataParallel and FSDP2 it is the parameter's own dtype, because their buckets
take nothing else. A block sets it when it begins and when it ends, and a wrapper at the beginning of each backward pass
(``ddp_hook``), so no pass depends on how gradients were cleared before it.

Before torch 2.13 there is no ``Tensor.grad_dtype``, and the gradient of a 16-bit parameter cannot be fp32. There the
fp32 gradient is kept beside ``p.grad``, which is its rounded image. If a user changes the image, for example by
clipping over ``model.parameters()``, the image becomes the gradient, and the other bits are lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..core.dtypes import HALF_DTYPES, is_half
from ..core.torch_compat import HAS_GRAD_DTYPE, is_view
from ..kernels import multi_tensor
from ..kernels.multi_tensor import TensorGroupsCache
from ..kernels.shards import ORDINARY, is_sharded, local
from .unscale import Unscaler, reciprocal, widened

__all__ = ["Chooser", "Gradients", "get_grads", "halves", "set_grads", "widen"]


class _Image(NamedTuple):
    """Before torch 2.13: an fp32 gradient, its rounded image in ``p.grad``, and the version of the image then."""

    wide: torch.Tensor
    narrow: torch.Tensor
    version: int


_IMAGES: MutableMapping[torch.Tensor, _Image] = WeakIdKeyDictionary()


def get_grads(params: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """The gradients of parameters."""
    grads = [p.grad for p in params]
    if not HAS_GRAD_DTYPE and _IMAGES:
        for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
            image = _IMAGES.get(param)
            if image is not None and grad is image.narrow and grad._version == image.version:
                grads[i] = image.wide
    return grads


def set_grads(params: Iterable[torch.Tensor], grads: Iterable[torch.Tensor]) -> None:
    """Give parameters gradients, which may have another dtype than the parameters."""
    for param, grad in zip(params, grads, strict=True):
        if HAS_GRAD_DTYPE:
            if param.grad_dtype is not grad.dtype:
                param.grad = None
                # Wrappers and shards take gradients of the parameter's dtype alone, and set it when a pass begins. For
                # any other parameter later passes deliver the dtype that is there now, however gradients are cleared.
                reduced = is_sharded(param) or any(id(param) in reduction.params for reduction in REDUCTIONS)
                param.grad_dtype = None if reduced else grad.dtype
            param.grad = grad
        elif grad.dtype is param.dtype:
            param.grad = grad
        else:
            param.grad = narrow = grad.to(param.dtype)
            _IMAGES[param] = _Image(grad, narrow, narrow._version)


@torch.no_grad()
def widen(params: Sequence[torch.Tensor]) -> None:
    """Make 16-bit gradients of these parameters fp32."""
    half = [p for p, g in zip(params, get_grads(params), strict=True) if g is not None and g.dtype in HALF_DTYPES]
    set_grads(half, [p.grad.float() for p in half])  # type: ignore[union-attr]


Chooser = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
"""Picks some parameters out of a list."""


class Reduces(Protocol):
    """The all-reduce of one DistributedDataParallel wrapper, from ``distributed/ddp_hook.py``.

    Attributes:
        params: identities of the parameters whose gradients it averages, which live as long as the wrapper.
    """

    params: frozenset[int]


def halves(params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Those of some parameters that have 16 bits."""
    return [p for p in params if p.dtype in HALF_DTYPES]


REDUCTIONS: list[Reduces] = []
"""The all-reduces of the living wrappers, in the order in which these were made, which is the same on every rank."""


def reduced_params(params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Those of some parameters whose gradients ranks reduce: in a wrapper, or sharded.

    Their gradients must have the parameter's dtype, because buckets and shards take no other.
    """
    if not REDUCTIONS and ORDINARY.issuperset(map(type, params)):
        return []
    in_wrappers = frozenset[int]().union(*(reduction.params for reduction in REDUCTIONS))
    return [p for p in params if id(p) in in_wrappers or is_sharded(p)]


class Gradients:
    """The gradients of one optimizer's parameters.

    Args:
        wide: picks the parameters whose gradients are to be fp32 although backward passes compute them in 16 bits; None
            if there are none.
        narrow: whether such a gradient may stay in 16 bits until the step if it is neither scaled nor added to another.
        reduced: picks the parameters whose gradients must have the parameter's dtype.

    Attributes:
        any_wide: whether ``wide`` may pick any.
        wide: as given.
        saved: the gradients that are set aside, by the identity of the parameter.
    """

    def __init__(self, wide: Chooser | None, *, narrow: bool = False, reduced: Chooser = reduced_params) -> None:
        self.any_wide = wide is not None
        self.wide: Chooser = wide or (lambda _: [])
        self.saved: dict[int, torch.Tensor] = {}
        self._narrow = narrow
        self._reduced = reduced
        self._pending: list[torch.Tensor] = []  # had no gradient in their place when the block was opened
        self._unscaler = Unscaler()
        self._clipper = Unscaler()
        self._checker = Unscaler()
        self._groups = TensorGroupsCache()

    # ---- around a backward pass

    def begin(
        self,
        params: Sequence[torch.Tensor],
        scale: torch.Tensor | None,
        seen: set[int] | None = None,
        in_place: Chooser | None = None,
    ) -> None:
        """Set aside the present gradients, so that a pass scaled by ``scale`` brings only its own.

        Args:
            params: those of the optimizer.
            scale: by what the gradients of the pass are to be divided. With None nothing is set aside, unless
                gradients are to become fp32.
            seen: identities of parameters that another optimizer has set aside for this pass; extended.
            in_place: picks those whose gradients stay in place, multiplied by ``scale``, because they are averaged
                there with what the pass brings; None if there are none.
        """
        if scale is None and not self.any_wide:
            params = []
        if seen is not None:
            params = [p for p in params if id(p) not in seen]
            seen.update(map(id, params))
        there = [p for p in params if p.grad is not None]
        if there and in_place is not None:
            staying = in_place(there)
            if scale is not None:
                self.multiply(staying, scale)
            stays = set(map(id, staying))
            there = [p for p in there if id(p) not in stays]
        if there:
            for param, grad in zip(there, get_grads(there), strict=True):
                assert grad is not None
                # A view may lie in a bucket of DistributedDataParallel, which the pass overwrites.
                self.saved[id(param)] = grad.clone() if is_view(grad) and grad.dtype is param.dtype else grad
        # All are saved before the first is taken away, so that an interrupt anywhere leaves what `restore` needs.
        self._pending = [p for p in params if p.grad is None or id(p) in self.saved]
        for param in there:
            param.grad = None
        self.expect(self._pending, as_computed=scale is not None or self._narrow)

    def expect(self, params: Sequence[torch.Tensor], *, as_computed: bool = False) -> None:
        """Choose the dtype in which the next pass delivers gradients to the parameters that have none.

        Args:
            params: those of the optimizer.
            as_computed: leave it to the pass, because somebody makes them fp32, or uses them up, before a user can see
                them.
        """
        if not HAS_GRAD_DTYPE or not self.any_wide:
            return
        empty = [p for p in params if p.grad is None]
        wide = self.wide(empty)
        if own := set(map(id, self._reduced(wide))):
            wide = [p for p in wide if id(p) not in own]
        dtype = None if as_computed else torch.float32
        for param in [p for p in wide if p.grad_dtype is not dtype]:
            param.grad_dtype = dtype
        if len(wide) < len(empty):
            chosen = set(map(id, wide))
            for param in [p for p in empty if p.grad_dtype is not p.dtype and id(p) not in chosen]:
                param.grad_dtype = param.dtype

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
        """Whether the pass in the open block has brought any gradient to a parameter that had none."""
        return any(p.grad is not None for p in self._pending)

    def restore(self) -> None:
        """After ``begin``, when the pass failed: drop its gradients and put back those that were set aside."""
        for param in self._pending:
            param.grad = None
            if id(param) in self.saved:
                set_grads([param], [self.saved[id(param)]])
        self.forget()

    def forget(self) -> None:
        """Drop what is saved."""
        self.saved.clear()
        self._pending = []

    def finish(
        self,
        params: Sequence[torch.Tensor],
        scale: torch.Tensor | None,
        found_inf: torch.Tensor,
        seen: set[int] | None = None,
        *,
        goes_on: bool = False,
    ) -> None:
        """Unscale the new gradients, and add those that were set aside.

        Args:
            params: those of the optimizer.
            scale: 0-dim float32 tensor, by which the gradients are multiplied; None if they are not.
            found_inf: 0-dim float32 tensor, set to 1.0 if a new gradient holds inf or NaN. Not looked at without scale.
            seen: identities of parameters that another optimizer has served in this pass; extended.
            goes_on: whether the pass brings more gradients.
        """
        if seen is not None:
            params = [p for p in params if id(p) not in seen]
            seen.update(map(id, params))
        inv_scale = None if scale is None else reciprocal(scale)
        narrow: list[torch.Tensor] = []
        if self.any_wide and (inv_scale is not None or self.saved or not self._narrow):
            wide = self.wide([p for p in params if p.grad is not None])
            narrow = [p for p in wide if p.grad.dtype in HALF_DTYPES]  # type: ignore[union-attr]
        if narrow:
            self._unscale_into(narrow, params, inv_scale, found_inf)
        elif inv_scale is not None:
            self._unscaler.unscale(self._unscaler.gather(params), inv_scale, found_inf)
        if self.saved:
            self._add_saved(params)
        if not goes_on:
            if left := [p for p in self._pending if p.grad is None]:
                self.expect(left)
            self._pending = []

    @torch.no_grad()
    def _unscale_into(
        self,
        narrow: list[torch.Tensor],
        params: Sequence[torch.Tensor],
        inv_scale: torch.Tensor | None,
        found_inf: torch.Tensor,
    ) -> None:
        """Unscale gradients, those of some parameters into fp32, where what was set aside is added to them.

        Args:
            narrow: the parameters whose 16-bit gradients become fp32.
            params: all whose gradients are unscaled; these among them.
            inv_scale: 0-dim float32 tensor; None if the gradients are not scaled.
            found_inf: as in ``finish``.
        """
        first: dict[int, torch.Tensor] = {}
        again: list[torch.Tensor] = []
        for param in narrow:
            if param.grad.is_sparse:  # type: ignore[union-attr]
                # Coalesced in fp32, where duplicates of an index cannot overflow.
                set_grads([param], [param.grad.float().coalesce()])  # type: ignore[union-attr]
            elif id(param) in self.saved and not self.saved[id(param)].is_sparse:
                again.append(param)
            elif inv_scale is not None or not self._narrow:
                first[id(param)] = param
        if again:
            grads: list[torch.Tensor] = [param.grad for param in again]  # type: ignore[misc]
            sums = [self.saved.pop(id(param)).float() for param in again]
            groups = self._groups.get("again", again, grads, sums)
            multi_tensor.unscale_into(grads, sums, inv_scale, found_inf, accumulate=True, groups=groups)
            set_grads(again, sums)
        if inv_scale is None:
            rows = list(first.values())
        else:
            done = set(map(id, again))
            rows = [p for p in params if p.grad is not None and id(p) not in done]
        if rows:
            grads = self._unscaler.gather(rows)
            targets = [
                torch.empty_like(grad, dtype=torch.float32) if id(param) in first else grad
                for param, grad in zip(rows, grads, strict=True)
            ]
            groups = self._groups.get("first", rows, grads, targets)
            multi_tensor.unscale_into(grads, targets, inv_scale, found_inf, accumulate=False, groups=groups)
            set_grads(first.values(), [t for param, t in zip(rows, targets, strict=True) if id(param) in first])

    @torch.no_grad()
    def _add_saved(self, params: Sequence[torch.Tensor]) -> None:
        mine = [p for p in params if id(p) in self.saved]
        for param, grad in zip(mine, get_grads(mine), strict=True):
            before = self.saved.pop(id(param))
            if grad is None:
                set_grads([param], [before])
            elif grad.is_sparse or before.is_sparse or grad.dtype is not before.dtype:
                # torch adds no sparse tensors of 16 bits, and nothing dense to a sparse one
                first, second = (grad, before) if before.is_sparse else (before, grad)
                total = widened(first) + widened(second)
                set_grads([param], [total if is_half(param) and self.wide([param]) else total.to(before.dtype)])
            else:
                grad.add_(before)

    # ---- between passes and step

    @torch.no_grad()
    def clear_overflow(self, params: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Set the gradients that are there to zero if one of them holds inf or NaN. Reads no device.

        Returns:
            0-dim float32 tensor, 1.0 if one does; None if there are no gradients.
        """
        grads = self._checker.gather(params)
        if not grads:
            return None
        found_inf = torch.zeros((), dtype=torch.float32, device=grads[0].device)
        self._checker.unscale(grads, torch.ones_like(found_inf), found_inf)
        for grad in map(local, grads):
            grad.masked_fill_((found_inf != 0).to(grad.device, non_blocking=True), 0.0)
        return found_inf

    def unscale_or_check(
        self, params: Sequence[torch.Tensor], scale: torch.Tensor, found_inf: torch.Tensor, *, step_checks: bool
    ) -> bool:
        """Unscale gradients in place. If any has 16 bits, only look for inf and NaN, unless the step does that, too.

        Returns:
            Whether unscaling is left to the step, which does it in fp32.
        """
        if step_checks and any(p.grad is not None and is_half(p.grad) for p in params):
            return True
        grads = self._unscaler.gather(params)
        left = any(grad.dtype in HALF_DTYPES for grad in grads)
        self._unscaler.unscale(grads, torch.ones_like(scale) if left else reciprocal(scale), found_inf)
        return left

    def clip(self, params: Sequence[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip unscaled gradients to a total norm; see ``Unscaler.clip``."""
        widen(self.wide(params))
        return self._clipper.clip(params, max_norm, norm_type)

    def unscale_and_clip(
        self, params: Sequence[torch.Tensor], scale: torch.Tensor, found_inf: torch.Tensor, max_norm: float
    ) -> torch.Tensor:
        """Unscale and clip to a 2-norm, with one read of the gradients. Returns the norm before clipping."""
        return self._unscaler.unscale_and_clip(self._unscaler.gather(params), reciprocal(scale), found_inf, max_norm)

    def clear(self, params: Sequence[torch.Tensor]) -> None:
        """Called after the gradients were set to None or zero."""
        self.saved.clear()
        self._pending = []
        if not self.any_wide:
            return
        zeroed = [p for p in params if p.grad is not None and p.grad.dtype is not p.dtype]
        # A wrapper takes only gradients of the parameter's dtype, also if they are zeros.
        for param in self._reduced(self.wide(zeroed)) if zeroed else ():
            set_grads([param], [torch.zeros_like(param)])
        self.expect(params)
