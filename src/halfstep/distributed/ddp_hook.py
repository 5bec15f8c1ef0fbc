"""One DistributedDataParallel wrapper: what its buckets carry, so that ranks average whole accumulation windows.

torch's reducer all-reduces what lies in the ``.grad`` of the model, in the dtype of the model. What earlier micro-steps
brought is held elsewhere meanwhile, in fp32 (``engine.gradients``), so a communication hook adds it to the bucket. What
happens when the last micro-step of a window was not reduced is for ``engine.ranks``.
"""

# No postponed annotations here: torch compares those of a communication hook with its own classes.
import weakref
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from ..core.dtypes import is_half
from ..gradients.ledger import HAS_GRAD_DTYPE, set_grads
from ..kernels.shards import is_sharded

__all__ = ["Reduction", "Wire", "has_work", "known_wrappers", "reduction_of", "set_wire", "wrapped", "wrappers_seen"]


@dataclass(frozen=True)
class Wire:
    """In which form gradients travel between the ranks.

    Attributes:
        widen: send 16-bit gradients as fp32: True always; None where parameters have masters, so that the sum over
            micro-steps is never rounded to 16 bits; False never.
        predivide: divide by this before the sum, and by the rest of the world size after it. None divides by the
            world size before, as torch does: no overflow, at the price of small 16-bit numbers.
        average: False leaves the sum, divided by ``predivide`` alone: see ``Reduction.factor``.
    """

    widen: bool | None = None
    predivide: float | None = None
    average: bool = True


_seen = 0
_WRAPPERS: MutableMapping[Any, Wire] = WeakIdKeyDictionary()
_REDUCTIONS: MutableMapping[Any, "Reduction"] = WeakIdKeyDictionary()
_WRAPPED: set[int] = set()  # identities of living parameters
_ORDINARY = {torch.Tensor, torch.nn.Parameter}


def _notice(module: torch.nn.Module, name: str, submodule: torch.nn.Module | None) -> None:
    """Called by torch whenever a module gets a submodule, so also when DistributedDataParallel takes its model."""
    global _seen
    if isinstance(module, DistributedDataParallel) and module not in _WRAPPERS:
        _WRAPPERS[module] = Wire()
        _seen += 1
        for param in () if submodule is None else submodule.parameters():
            if id(param) not in _WRAPPED:
                _WRAPPED.add(id(param))
                weakref.finalize(param, _WRAPPED.discard, id(param)).atexit = False
            if HAS_GRAD_DTYPE and param.grad is None and param.grad_dtype is not param.dtype:
                param.grad_dtype = param.dtype


torch.nn.modules.module.register_module_module_registration_hook(_notice)


def wrappers_seen() -> int:
    """How many wrappers there have been: when it has not moved, there is nothing new to look at."""
    return _seen


def wrapped(params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Those of some parameters that are in a wrapper or sharded: these take gradients in their own dtype only."""
    found: list[torch.Tensor] = []
    if not set(map(type, params)) <= _ORDINARY:
        found = [p for p in params if is_sharded(p)]
    return found + [p for p in params if id(p) in _WRAPPED] if _seen else found


def known_wrappers() -> list[DistributedDataParallel]:
    """The living wrappers made since halfstep was imported."""
    return list(_WRAPPERS)


def set_wire(wrapper: DistributedDataParallel, wire: Wire) -> None:
    """Choose how the gradients of a wrapper travel; call it before the first backward pass, alike on every rank."""
    _WRAPPERS[wrapper] = wire


def has_work(wrapper: DistributedDataParallel) -> bool:
    """Whether its gradients become others by being reduced: on one rank a mean is the gradient that is there."""
    group = getattr(wrapper, "process_group", None)
    return group is not None and (dist.get_world_size(group) > 1 or not _WRAPPERS.get(wrapper, Wire()).average)


def reduction_of(wrapper: DistributedDataParallel) -> "Reduction":
    """The reduction of a wrapper, made when first asked for."""
    found = _REDUCTIONS.get(wrapper)
    if found is None:
        found = _REDUCTIONS[wrapper] = Reduction(wrapper, _WRAPPERS.get(wrapper, Wire()))
    return found


class Reduction:
    """The all-reduce of one wrapper.

    Attributes:
        group: the process group.
        world: its size.
        hooked: whether our communication hook is in place. Where a user has registered another, that one stays, and
            where nothing is to be added to what torch does there is none: it divides while it fills its buckets.
        device: where its parameters are.
        factor: what a mean over ranks is to be multiplied by before a step; 1.0 where a mean is what is wanted.
        watched: whether the present backward pass is in a block of ours. Then means are exchanged.
        scale: by what the gradients of the present backward pass are to be divided; None if by nothing.
        held: for each optimizer in that block, the gradients that are set aside, by the identity of the parameter.
    """

    def __init__(self, wrapper: DistributedDataParallel, wire: Wire) -> None:
        self._wrapper = weakref.ref(wrapper)
        self.group: dist.ProcessGroup = wrapper.process_group
        self.world = dist.get_world_size(self.group)
        self.device: torch.device = next(wrapper.module.parameters()).device
        self.factor = 1.0 if wire.average else self.world / (wire.predivide or 1.0)
        self.watched = False
        self.scale: torch.Tensor | None = None
        self.held: list[dict[int, torch.Tensor]] = []
        self._wire = wire
        self._wide: set[int] = set()  # identities of parameters whose gradients are to be fp32
        ignored = set(wrapper.parameters_to_ignore)
        self._params = {id(p) for name, p in wrapper.module.named_parameters() if name not in ignored}
        # Where parameters can go without a gradient, torch leaves theirs as they are, even if ranks differ.
        self._partial = bool(wrapper.find_unused_parameters or wrapper.static_graph)
        self._unused = bool(wrapper.find_unused_parameters and not wrapper.static_graph)
        self._kept: dict[int, torch.Tensor] = {}
        self._own_talks = 0
        self._arriving = False
        self._sums: list[tuple[torch.Tensor, torch.Tensor]] = []  # parameters and their fp32 gradients in this pass
        self._views: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.hooked = False
        if self._partial or wire != Wire():
            self.hook()

    def widen(self, params: Iterable[torch.Tensor]) -> None:
        """The gradients of these parameters are to be fp32; alike on every rank."""
        new = {id(p) for p in params if self.holds(p)} - self._wide
        if new:
            self._wide |= new
            if not self.hooked:
                self.hook()

    def hook(self) -> None:
        """Register the communication hook, which adds to buckets what is held."""
        wrapper = self._wrapper()
        # A built-in hook leaves no other trace than in the log.
        if wrapper is None or wrapper._comm_hooks or wrapper._get_ddp_logging_data().get("comm_hook"):
            return
        wrapper.register_comm_hook(weakref.ref(self), _communicate)
        self.hooked = True

    @property
    def alive(self) -> bool:
        """Whether the wrapper still exists."""
        return self._wrapper() is not None

    @property
    def talks(self) -> int:
        """How many backward passes the ranks have averaged, as far as our hook has seen them."""
        return self._own_talks

    def release(self) -> bool:
        """The backward pass is over; whether something is still held that it could have averaged."""
        unsent = any(key in self._params for held in self.held for key in held)
        self.watched, self.scale, self.held = False, None, []
        return unsent

    @property
    def syncs(self) -> bool:
        """Whether the latest forward pass asked for a reduction: all there is to know before it comes, or under
        somebody else's hook.
        """
        wrapper = self._wrapper()
        return wrapper is not None and bool(wrapper.require_forward_param_sync)

    def holds(self, param: torch.Tensor) -> bool:
        """Whether this wrapper reduces the gradient of a parameter."""
        return id(param) in self._params

    # ---- around a backward pass that the ranks do not average

    def kept(self, params: Iterable[torch.Tensor]) -> None:
        """A backward pass brought these parameters gradients, which stayed on this rank."""
        if self._unused:
            self._kept.update((id(param), param) for param in params)

    def fill_in(self) -> None:
        """Before a pass: zeros where the reducer expects gradients that have been taken elsewhere.

        With ``find_unused_parameters`` it remembers which parameters were used since ranks last spoke, and calls it an
        internal error if one of them has no gradient and the present pass does not use it (torch 2.13).
        """
        if self.syncs:
            for param in self._kept.values():
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
            self._kept.clear()

    # ---- during a backward pass

    @torch.no_grad()
    def communicate(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        """Add what this rank has accumulated so far to a bucket, then average the bucket over the ranks."""
        self._begin_arrival()
        buffer, params = bucket.buffer(), bucket.parameters()
        wide = any(id(p) in self._wide for p in params)
        widen = is_half(buffer) and (wide if self._wire.widen is None else self._wire.widen)
        sent = buffer.float() if widen else buffer
        if sent.is_sparse:
            sent = self._add_sparse(sent, params[0])
            if widen:
                self._sums.append((params[0], sent))
        elif wide or self._partial:
            self._add(bucket, buffer, sent)
        average = self._wire.average or self.watched
        before = self._wire.predivide or (self.world if average else 1.0)
        after = self.world / before if average else 1.0
        if before != 1.0:
            sent.div_(before)

        def arrived(future: torch.futures.Future[Any]) -> torch.Tensor:
            with torch.no_grad():
                if after != 1.0:
                    sent.div_(after)
                if sent.is_sparse:
                    buffer_of_sparse: torch.Tensor = sent.to(buffer.dtype)
                    return buffer_of_sparse
                if widen:
                    buffer.copy_(sent)
                averaged: torch.Tensor = buffer
                return averaged

        work = dist.all_reduce(sent, group=self.group, async_op=True)
        future: torch.futures.Future[torch.Tensor] = work.get_future().then(arrived)
        return future

    def _add(self, bucket: Any, buffer: torch.Tensor, sent: torch.Tensor) -> None:
        local: list[torch.Tensor] = []
        slots: list[torch.Tensor] = []
        for param, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            slot = grad
            if sent is not buffer:
                slot = sent.as_strided(grad.size(), grad.stride(), grad.storage_offset() - buffer.storage_offset())
            held = self._take(param)
            if held is not None:
                slots.append(slot)
                local.append(held)
            if sent is not buffer and id(param) in self._wide:
                self._sums.append((param, slot))
            elif self._partial:
                self._views.append((param, grad))
        if local:
            if self.scale is not None:
                local = list(torch._foreach_mul(local, self.scale.to(local[0].device, non_blocking=True)))
            torch._foreach_add_(slots, local)

    def _add_sparse(self, sent: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
        """The same for a bucket that holds the gradient of one sparse parameter."""
        held = self._take(param)
        if held is not None:
            sent = sent + (held if self.scale is None else held * self.scale).to(sent.dtype)
        return sent.coalesce()

    def _take(self, param: torch.Tensor) -> torch.Tensor | None:
        """What is held of a parameter whose gradient is to be fp32."""
        found = [held.pop(id(param)) for held in self.held if id(param) in self._wide and id(param) in held]
        return found[0] if found else None

    def _begin_arrival(self) -> None:
        """At the first bucket of a pass: ask to be called back when the reducer has put the gradients in place."""
        if self._arriving:
            return
        self._arriving = True
        self._own_talks += 1
        self._kept.clear()
        engine = torch.autograd.Variable._execution_engine
        # The reducer queues its own last act after its last bucket; a callback queued by a callback runs after that.
        engine.queue_callback(lambda: engine.queue_callback(self._arrived))

    @torch.no_grad()
    def _arrived(self) -> None:
        self._arriving = False
        for param, total in self._sums if self.watched else ():
            # Where no rank has ever used the parameter it has no gradient, rather than one of zeros.
            if param.grad is not None or total.any():
                set_grads([param], [total])
        for param, view in self._views:
            if param.grad is None:
                if view.any():  # nobody used it in this pass, but somebody did before
                    param.grad = view.clone()
            elif param.grad.data_ptr() != view.data_ptr():
                param.grad.copy_(view)
        self._sums.clear()
        self._views.clear()


def _communicate(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """The communication hook; weak, because the reducer owns it and the wrapper owns the reducer."""
    reduction: Reduction | None = state()
    if reduction is None:
        raise AssertionError("the wrapper is gone and its reducer still works")
    return reduction.communicate(bucket)
