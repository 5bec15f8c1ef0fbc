"""The communication hook of a DistributedDataParallel wrapper, so that ranks average whole accumulation windows.

torch's reducer all-reduces what lies in ``p.grad``, in the dtype of the model. Inside of our blocks the gradients of
earlier micro-steps are set aside, in fp32 (``gradients.ledger``), so the hook adds them to the bucket. If the last
micro-step of a window was not reduced, ``ddp_sync`` does it before the step.
"""

# No postponed annotations here: torch compares those of a communication hook with its own classes.
import weakref
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from ..core.dtypes import is_half
from ..core.errors import UsageError
from ..core.torch_compat import (
    HAS_GRAD_DTYPE,
    backward_pass_id,
    divides_by_initial_world,
    forget_used_parameters,
    has_comm_hook,
    has_rebuilt_buckets,
    queue_after_backward,
    rebuild_buckets,
)
from ..gradients.ledger import IN_WRAPPERS, set_grads
from ..gradients.master_registry import keeper_of
from .joining import is_joining, share_masters_after_join

__all__ = [
    "AllReduceOptions",
    "Reduction",
    "changes_gradients",
    "known_wrappers",
    "reduction_of",
    "set_options",
    "wrappers_seen",
]


@dataclass(frozen=True)
class AllReduceOptions:
    """How the gradients of a wrapper are sent between the ranks.

    Attributes:
        widen: whether to send 16-bit gradients as fp32. True: always. None: only for parameters with masters, so that
            the sum over micro-steps is never rounded to 16 bits. False: never.
        predivide: divide by this before the sum, and by the rest of the world size after it. None divides by the
            world size before, as torch does: no overflow, at the price of small 16-bit numbers.
        average: False leaves the sum, divided by ``predivide`` alone: see ``Reduction.factor``.
    """

    widen: bool | None = None
    predivide: float | None = None
    average: bool = True


wrappers_seen = 0
"""How many wrappers this process has made; while it stays the same there is none to discover."""
_WRAPPERS: MutableMapping[Any, AllReduceOptions] = WeakIdKeyDictionary()
_REDUCTIONS: MutableMapping[Any, "Reduction"] = WeakIdKeyDictionary()


def _register_wrapper(module: torch.nn.Module, name: str, submodule: torch.nn.Module | None) -> None:
    """Called by torch whenever a module gets a submodule, so also when DistributedDataParallel takes its model."""
    global wrappers_seen
    if type(module).__name__ == "FullyShardedDataParallel" and submodule is not None:
        _refuse_masters(submodule)
    if isinstance(module, DistributedDataParallel) and module not in _WRAPPERS:
        _WRAPPERS[module] = AllReduceOptions()
        wrappers_seen += 1
        share_masters_after_join(module)
        for param in () if submodule is None else submodule.parameters():
            if id(param) not in IN_WRAPPERS:
                IN_WRAPPERS.add(id(param))
                weakref.finalize(param, IN_WRAPPERS.discard, id(param)).atexit = False
            if HAS_GRAD_DTYPE and param.grad is None and param.grad_dtype is not param.dtype:
                param.grad_dtype = param.dtype


def _refuse_masters(module: torch.nn.Module) -> None:
    if any(keeper_of(p) is not None for p in module.parameters()):
        raise UsageError(
            "FullyShardedDataParallel (FSDP1) was given a model whose optimizer has fp32 masters (O2). It cuts the "
            "weights, and the masters would stay whole. Wrap the model first, make the optimizer, and call "
            "amp.initialize at O0 or O1 then; fully_shard (FSDP2) goes with masters."
        )


torch.nn.modules.module.register_module_module_registration_hook(_register_wrapper)


def known_wrappers() -> list[DistributedDataParallel]:
    """The living wrappers made since halfstep was imported."""
    return list(_WRAPPERS)


def set_options(wrapper: DistributedDataParallel, options: AllReduceOptions) -> None:
    """Choose how the gradients of a wrapper travel; call it before the first backward pass, the same on every rank."""
    _WRAPPERS[wrapper] = options


def changes_gradients(wrapper: DistributedDataParallel) -> bool:
    """Whether the all-reduce changes any gradient. A mean over one rank does not."""
    group = getattr(wrapper, "process_group", None)
    return group is not None and (
        dist.get_world_size(group) > 1 or not _WRAPPERS.get(wrapper, AllReduceOptions()).average
    )


def reduction_of(wrapper: DistributedDataParallel) -> "Reduction":
    """The reduction of a wrapper, made when first asked for."""
    found = _REDUCTIONS.get(wrapper)
    if found is None:
        found = _REDUCTIONS[wrapper] = Reduction(wrapper, _WRAPPERS.get(wrapper, AllReduceOptions()))
    return found


class Reduction:
    """The all-reduce of one wrapper.

    Attributes:
        group: the process group.
        world: its size.
        hooked: whether our communication hook is registered. It is not where a user has registered one, nor where
            torch's own all-reduce does what is needed.
        device: where its parameters are.
        has_cpu: whether the process group has a backend for tensors on the CPU; NCCL alone has not.
        factor: what a mean over ranks is to be multiplied by before a step; 1.0 if the mean is wanted.
        watched: whether the present backward pass is in one of our blocks. Then means are sent.
        scale: by what the gradients of the present backward pass are to be divided; None if by nothing.
        held: for each optimizer in that block, the gradients that are set aside, by the identity of the parameter.
        allreduces: how many backward passes our hook has seen the ranks average.
    """

    def __init__(self, wrapper: DistributedDataParallel, options: AllReduceOptions) -> None:
        self._wrapper = weakref.ref(wrapper)
        self.group: dist.ProcessGroup = wrapper.process_group
        self.world = dist.get_world_size(self.group)
        self.device: torch.device = next(wrapper.module.parameters()).device
        self.has_cpu = "cpu:" in dist.get_backend_config(self.group)
        self.factor = 1.0 if options.average else self.world / (options.predivide or 1.0)
        self.watched = False
        self.scale: torch.Tensor | None = None
        self.held: list[dict[int, torch.Tensor]] = []
        self._options = options
        self._wide: set[int] = set()  # identities of parameters whose gradients are to be fp32
        ignored = set(wrapper.parameters_to_ignore)
        self._params = {id(p) for name, p in wrapper.module.named_parameters() if name not in ignored}
        # If parameters may go unused, torch leaves the gradients of unused ones alone, even if ranks differ.
        self._partial = bool(wrapper.find_unused_parameters or wrapper.static_graph)
        self._unused = bool(wrapper.find_unused_parameters and not wrapper.static_graph)
        self._unsynced_params: dict[int, torch.Tensor] = {}
        self.allreduces = 0
        self._arriving = False
        self._sums: list[tuple[torch.Tensor, torch.Tensor]] = []  # parameters and their fp32 gradients in this pass
        self._views: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.hooked = False
        if self._partial or options != AllReduceOptions():
            self.hook()

    def widen(self, params: Iterable[torch.Tensor]) -> None:
        """The gradients of these parameters are to be fp32, on every rank."""
        new = {id(p) for p in params if self.holds(p)} - self._wide
        if new:
            self._wide |= new
            if not self.hooked:
                self.hook()

    def hook(self) -> None:
        """Register the communication hook, which adds to buckets what is held."""
        wrapper = self._wrapper()
        if wrapper is None or has_comm_hook(wrapper):
            return
        wrapper.register_comm_hook(weakref.ref(self), _communicate)
        self.hooked = True

    @property
    def alive(self) -> bool:
        """Whether the wrapper still exists."""
        return self._wrapper() is not None

    def end_backward(self) -> bool:
        """The backward pass is over; whether gradients are still set aside that it could have averaged."""
        unsent = any(key in self._params for held in self.held for key in held)
        self.watched, self.scale, self.held = False, None, []
        return unsent

    def rebuild_buckets(self) -> None:
        """After a backward pass that the ranks averaged: have the buckets rebuilt now that all ranks are here."""
        wrapper = self._wrapper()
        if wrapper is None or self.is_joining:
            return
        views = bool(wrapper.gradient_as_bucket_view and self._wide and not has_rebuilt_buckets(wrapper))
        before = [(p, p.grad) for p in wrapper.module.parameters() if p.grad is not None] if views else []
        rebuild_buckets(wrapper)
        # Gradients become views of the new buckets, which would round those that are fp32 now.
        for param, grad in before:
            if param.grad is not None and param.grad.dtype is not grad.dtype:
                set_grads([param], [grad])

    @property
    def will_sync(self) -> bool:
        """Whether the latest forward pass asked for an all-reduce.

        Before the first bucket arrives, and under a user's hook, this is the only sign that there will be one.
        """
        wrapper = self._wrapper()
        return wrapper is not None and bool(wrapper.require_forward_param_sync)

    def holds(self, param: torch.Tensor) -> bool:
        """Whether this wrapper reduces the gradient of a parameter."""
        return id(param) in self._params

    # ---- uneven inputs

    @property
    def is_joining(self) -> bool:
        """Whether this is inside of ``DistributedDataParallel.join``, where some ranks may have run out of inputs.

        Those repeat the collective operations of torch's reducer for the others, and no other operation.
        """
        wrapper = self._wrapper()
        return wrapper is not None and is_joining(wrapper)

    # ---- around a backward pass that the ranks do not average

    def remember_unsynced(self, params: Iterable[torch.Tensor]) -> None:
        """A backward pass brought gradients to these parameters, and they were not averaged."""
        if self._unused:
            self._unsynced_params.update((id(param), param) for param in params)

    def fill_missing_gradients(self) -> None:
        """Before a pass: give zeros to parameters whose gradients were set aside, where torch's reducer needs some.

        With ``find_unused_parameters`` the reducer remembers which parameters were used since the last all-reduce. It
        raises an internal error if one of them has no gradient and the present pass does not use it (torch 2.13).
        """
        if self.will_sync:
            for param in self._unsynced_params.values():
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
            self._unsynced_params.clear()

    def end_window(self) -> None:
        """The gradients were used: torch's reducer is to forget which parameters unsynced passes have used.

        It would remember until its next all-reduce, and give a parameter that nobody uses any more a gradient of zeros
        then (torch 2.13). While a synced backward pass is to come it has to remember.
        """
        wrapper = self._wrapper()
        if wrapper is not None and self._unsynced_params and self.hooked and not self.will_sync:
            forget_used_parameters(wrapper)
            self._unsynced_params.clear()

    # ---- during a backward pass

    @torch.no_grad()
    def communicate(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        """Add what this rank has accumulated so far to a bucket, then average the bucket over the ranks."""
        takes_part = backward_pass_id() != -1  # it has not run out of inputs
        if takes_part:
            self._begin_arrival()
        buffer, params = bucket.buffer(), bucket.parameters()
        wide = any(id(p) in self._wide for p in params)
        widen = is_half(buffer) and (wide if self._options.widen is None else self._options.widen)
        sent = buffer.float() if widen else buffer
        if not takes_part:
            pass
        elif sent.is_sparse:
            sent = self._add_sparse(sent, params[0])
            if widen:
                self._sums.append((params[0], sent))
        elif wide or self._partial:
            self._add(bucket, buffer, sent)
        average = self._options.average or self.watched
        world = self._active_ranks(takes_part) if self.is_joining else self.world
        before = self._options.predivide or (world if average else 1.0)
        after = world / before if average else 1.0
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

    def _active_ranks(self, takes_part: bool) -> int:
        """By how many ranks gradients are divided while some may have run out of inputs."""
        wrapper: Any = self._wrapper()
        if divides_by_initial_world(wrapper):
            return self.world
        active = torch.full((), float(takes_part), dtype=torch.float32, device=self.device)
        dist.all_reduce(active, group=self.group)
        return int(active)

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
        """``_add`` for a bucket that holds the gradient of one sparse parameter."""
        held = self._take(param)
        if held is not None:
            sent = sent + (held if self.scale is None else held * self.scale).to(sent.dtype)
        return sent.coalesce()

    def _take(self, param: torch.Tensor) -> torch.Tensor | None:
        """Remove and return the gradient that is set aside for a parameter with fp32 gradients; None without one."""
        found = [held.pop(id(param)) for held in self.held if id(param) in self._wide and id(param) in held]
        return found[0] if found else None

    def _begin_arrival(self) -> None:
        """At the first bucket of a pass: have ``_arrived`` called once the reducer has put the gradients in place."""
        if self._arriving:
            return
        self._arriving = True
        self.allreduces += 1
        self._unsynced_params.clear()
        # The reducer queues a last callback of its own. One that is queued by a callback runs after it.
        queue_after_backward(lambda: queue_after_backward(self._arrived))

    @torch.no_grad()
    def _arrived(self) -> None:
        self._arriving = False
        for param, total in self._sums if self.watched else ():
            # A parameter that no rank has ever used has no gradient, rather than one of zeros.
            if param.grad is not None or total.any():
                set_grads([param], [total])
        for param, view in self._views:
            if param.grad is None:
                if view.any():  # the pass did not use the parameter here, but an earlier pass of some rank did
                    param.grad = view.clone()
            elif param.grad.data_ptr() != view.data_ptr():
                param.grad.copy_(view)
        self._sums.clear()
        self._views.clear()


def _communicate(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """The communication hook. Its state is weak: the wrapper owns the reducer, which owns the hook."""
    reduction: Reduction | None = state()
    if reduction is None:
        raise AssertionError("the wrapper is gone and its reducer still works")
    return reduction.communicate(bucket)
