"""The communication hook of a DistributedDataParallel wrapper, so that ranks average whole accumulation windows.

torch's reducer all-reduces what lies in ``p.grad``, in the dtype of the model. During a backward pass the gradients of
earlier micro-steps are set aside, in fp32 (``gradients.ledger``), so the hook adds them to the bucket. A block does so
for the pass in it. Of a pass without a block the wrapper sees the beginning by itself, by a hook on its outputs. If the
last micro-step of a window of blocks was not reduced, ``ddp_sync`` does it before the step.
"""

# No postponed annotations here: torch compares those of a communication hook with its own classes.
import weakref
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..casting.dynamo import eager
from ..core.dtypes import is_half
from ..core.errors import UsageError
from ..core.torch_compat import (
    HAS_GRAD_DTYPE,
    backward_pass_id,
    divides_by_initial_world,
    forget_used_parameters,
    has_comm_hook,
    has_rebuilt_buckets,
    outputs_of_wrapper,
    queue_after_backward,
    rebuild_buckets,
)
from ..gradients.ledger import Gradients, set_grads
from ..gradients.master_registry import keeper_of
from ..gradients.table import REDUCTIONS, OptimizerTable, Slot, record_of
from .joining import is_joining, share_masters_after_join

__all__ = ["Reduction", "reduction_of"]


def _register_wrapper(module: torch.nn.Module, name: str, submodule: torch.nn.Module | None) -> None:
    """Called by torch whenever a module gets a submodule, so also when DistributedDataParallel takes its model."""
    if submodule is None:
        return
    if type(module).__name__ == "FullyShardedDataParallel":
        _refuse_masters(submodule)
    if isinstance(module, DistributedDataParallel) and name == "module":
        REDUCTIONS.append(reduction := Reduction(module, submodule))
        module.register_forward_hook(_watch_outputs)
        weakref.finalize(module, REDUCTIONS.remove, reduction).atexit = False
        share_masters_after_join(module)


def _refuse_masters(module: torch.nn.Module) -> None:
    if any(keeper_of(p) is not None for p in module.parameters()):
        raise UsageError(
            "FullyShardedDataParallel (FSDP1) was given a model whose optimizer has fp32 masters (O2). It cuts the "
            "weights, and the masters would stay whole. Wrap the model first, make the optimizer, and call "
            "amp.initialize at O0 or O1 then; fully_shard (FSDP2) goes with masters."
        )


torch.nn.modules.module.register_module_module_registration_hook(_register_wrapper)


def reduction_of(wrapper: DistributedDataParallel) -> "Reduction":
    """The all-reduce of a wrapper."""
    return next(one for one in REDUCTIONS if isinstance(one, Reduction) and one.wrapper() is wrapper)


class Reduction:
    """The all-reduce of one wrapper. It lives as long as the wrapper.

    Args:
        wrapper: which has its process group, and is about to take the model.
        module: the model.

    Attributes:
        wrapper: a weak reference to the wrapper.
        always_fp32: whether to send all 16-bit gradients as fp32. Those of parameters with masters always are, so that
            the sum over micro-steps is never rounded to 16 bits.
        predivide: divide by this before the sum, and by the rest of the world size after it. None divides by the
            world size before, as torch does: no overflow, at the price of small 16-bit numbers.
        average: False leaves the sum, divided by ``predivide`` alone: see ``factor``. This and the two before may
            change before the first backward pass, the same on every rank.
        params: the identities of the parameters whose gradients it averages. The wrapper keeps these alive.
        group: the process group.
        world: its size.
        device: where its parameters are.
        hooked: whether our communication hook is registered. It is not where a user has registered one, nor where
            torch's own all-reduce does what is needed.
        scale: by what the gradients of the present backward pass are to be divided; None if by nothing.
        open: the ``RankSync`` of each optimizer that has a block open. While there is one, ranks send means.
        allreduces: how many backward passes our hook has seen the ranks average.
    """

    def __init__(self, wrapper: DistributedDataParallel, module: torch.nn.Module) -> None:
        self.wrapper = weakref.ref(wrapper)
        params = [p for name, p in module.named_parameters() if name not in wrapper.parameters_to_ignore]
        self.always_fp32 = False
        self.predivide: float | None = None
        self.average = True
        self.params = frozenset(map(id, params))
        self.group: dist.ProcessGroup = wrapper.process_group
        self.world = dist.get_world_size(self.group)
        self.device = params[0].device
        self.hooked = False
        self.scale: torch.Tensor | None = None
        self.open: set[object] = set()
        self.allreduces = 0
        self._fp32: set[int] = set()  # identities of parameters whose gradients are to be fp32
        self._unsynced_params: set[torch.Tensor] = set()
        self._is_averaging = False  # between the first bucket of a backward pass and its end
        self._sums: list[tuple[torch.Tensor, torch.Tensor]] = []  # parameters and their fp32 gradients in this pass
        self._views: list[tuple[torch.Tensor, torch.Tensor]] = []
        # While a pass runs that no block is open for, its id and the gradients of parameters with masters.
        self._plain: tuple[int, Gradients] | None = None
        for param in params if HAS_GRAD_DTYPE else ():
            if param.grad is None and param.grad_dtype is not param.dtype:
                param.grad_dtype = param.dtype

    @property
    def factor(self) -> float:
        """The number that a mean over ranks is to be multiplied by before a step; 1.0 if the mean is wanted."""
        return 1.0 if self.average else self.world / (self.predivide or 1.0)

    @property
    def changes_gradients(self) -> bool:
        """Whether the all-reduce changes any gradient. A mean over one rank does not."""
        return self.world > 1 or not self.average

    @cached_property
    def has_cpu(self) -> bool:
        """Whether the process group has a backend for tensors on the CPU; NCCL alone has not."""
        return "cpu:" in dist.get_backend_config(self.group)

    @property
    def message_device(self) -> torch.device:
        """Device for numbers that the ranks exchange, and that the host reads."""
        return torch.device("cpu") if self.has_cpu else self.device

    @property
    def _may_leave_unused(self) -> bool:
        """Whether torch leaves the gradients of unused parameters alone, even if ranks differ in which they use."""
        wrapper = self.wrapper()
        return wrapper is not None and bool(wrapper.find_unused_parameters or wrapper.static_graph)

    def holds(self, param: torch.Tensor) -> bool:
        """Whether this wrapper reduces the gradient of a parameter."""
        return id(param) in self.params

    @property
    def will_sync(self) -> bool:
        """Whether the latest forward pass asked for an all-reduce.

        Before the first bucket arrives, and under a user's hook, this is the only sign that there will be one.
        """
        wrapper = self.wrapper()
        return wrapper is not None and bool(wrapper.require_forward_param_sync)

    @property
    def is_joining(self) -> bool:
        """Whether this is inside of ``DistributedDataParallel.join``, where some ranks may have run out of inputs."""
        wrapper = self.wrapper()
        return wrapper is not None and is_joining(wrapper)

    def hook(self, fp32: Iterable[torch.Tensor] = ()) -> None:
        """Register the communication hook, if torch's own all-reduce does not do what is needed.

        Args:
            fp32: parameters whose gradients are to be fp32, on every rank.
        """
        self._fp32.update(id(p) for p in fp32 if self.holds(p))
        wrapper = self.wrapper()
        if wrapper is None or self.hooked or has_comm_hook(wrapper):
            return
        own = self.always_fp32 or self.predivide is not None or not self.average
        if own or self._fp32 or self._may_leave_unused:
            wrapper.register_comm_hook(weakref.ref(self), _communicate)
            self.hooked = True

    # ---- around a backward pass in a block

    def watch(self, outputs: Any) -> None:
        """After a forward pass: have ``_begin_plain`` called where the backward pass begins."""
        wrapper: Any = self.wrapper()
        masters = [p for p in wrapper.module.parameters() if self.holds(p) and is_half(p) and keeper_of(p) is not None]
        if not masters:
            return
        if self.changes_gradients:
            self.hook(masters)
        begin = weakref.WeakMethod(self._begin_plain)
        for output in outputs_of_wrapper(outputs):
            if output.requires_grad:
                output.register_hook(lambda _: (method := begin()) and method(masters))

    def _begin_plain(self, masters: list[torch.Tensor]) -> None:
        """A backward pass begins. If it has no block, do what a block does to gradients of parameters with masters."""
        if self._plain is not None and self._plain[0] != backward_pass_id():
            self.abandon_plain()
        if self.open:
            return
        gradients = Gradients(OptimizerTable.of_params(masters, reduced=True))
        gradients.begin(None, set())  # a block that is gone at once: no optimizer waits for it
        self.begin_backward(self, None, gradients.table.slots)
        self._plain = backward_pass_id(), gradients
        before = self.allreduces

        def end() -> None:
            if self._plain is not None:
                gradients.finish(None, torch.zeros((), dtype=torch.float32, device=self.device))
                self.abandon_plain()
            if self.allreduces > before:
                self.rebuild_buckets()

        # After the reducer, and after ``_place_gradients``.
        queue_after_backward(lambda: queue_after_backward(lambda: queue_after_backward(end)))

    def abandon_plain(self) -> None:
        """Forget the pass without a block: it is over, or has failed."""
        if self._plain is not None:
            self.end_backward(self)
            self._plain[1].forget()
            self._plain = None

    def begin_backward(self, sync: object, scale: torch.Tensor | None, slots: Iterable[Slot]) -> None:
        """A backward pass of one optimizer begins.

        Args:
            sync: the ``RankSync`` of the optimizer.
            scale: see ``RankSync.begin_backward``.
            slots: likewise.
        """
        if not self.hooked and self.will_sync and self.changes_gradients:
            # Under a user's communication hook our gradients can only travel in ``p.grad``, in its dtype.
            for param, record in [(slot.param, slot.grad) for slot in slots if self.holds(slot.param)]:
                if record.saved is not None:
                    before, record.saved = record.saved, None
                    param.grad = (before if scale is None else before * scale).to(param.dtype)
        self.scale = scale
        self.open.add(sync)
        if self.will_sync:
            self._fill_missing_gradients()

    def end_backward(self, sync: object) -> None:
        """The backward pass of an optimizer is over, or it has failed."""
        self.open.discard(sync)
        self.scale = None

    def rebuild_buckets(self) -> None:
        """After a backward pass that the ranks averaged: have the buckets rebuilt now that all ranks are here."""
        wrapper = self.wrapper()
        if wrapper is None or self.is_joining:
            return
        views = bool(wrapper.gradient_as_bucket_view and self._fp32 and not has_rebuilt_buckets(wrapper))
        before = [(p, p.grad) for p in wrapper.module.parameters() if p.grad is not None] if views else []
        rebuild_buckets(wrapper)
        # Gradients become views of the new buckets, which would round those that are fp32 now.
        for param, grad in before:
            if param.grad is not None and param.grad.dtype is not grad.dtype:
                set_grads([param], [grad])

    def remember_unsynced(self, params: Iterable[torch.Tensor]) -> None:
        """A backward pass brought gradients to these parameters, and they were not averaged."""
        wrapper = self.wrapper()
        if wrapper is not None and wrapper.find_unused_parameters and not wrapper.static_graph:
            self._unsynced_params.update(params)

    def _fill_missing_gradients(self) -> None:
        """Before a synced pass: give zeros to parameters whose gradients were set aside.

        With ``find_unused_parameters`` torch's reducer remembers which parameters were used since the last all-reduce.
        It raises an internal error if one of them has no gradient and the present pass does not use it (torch 2.13).
        """
        for param in self._unsynced_params:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        self._unsynced_params.clear()

    def end_window(self) -> None:
        """The gradients were used: torch's reducer is to forget which parameters unsynced passes have used.

        It would remember until its next all-reduce, and give a parameter that nobody uses any more a gradient of zeros
        then (torch 2.13). While a synced backward pass is to come it has to remember.
        """
        wrapper = self.wrapper()
        if wrapper is not None and self._unsynced_params and self.hooked and not self.will_sync:
            forget_used_parameters(wrapper)
            self._unsynced_params.clear()

    # ---- during a backward pass

    @torch.no_grad()
    def communicate(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        """Add what this rank has accumulated so far to a bucket, then average the bucket over the ranks."""
        takes_part = backward_pass_id() != -1  # it has not run out of inputs
        if takes_part:
            self._first_bucket()
        buffer: torch.Tensor = bucket.buffer()
        params = bucket.parameters()
        fp32 = any(id(p) in self._fp32 for p in params)
        widen = is_half(buffer) and (fp32 or self.always_fp32)
        sent = buffer.float() if widen else buffer
        if takes_part and sent.is_sparse:
            sent = self._add_sparse(sent, params[0])
            if widen:
                self._sums.append((params[0], sent))
        elif takes_part and (fp32 or self._may_leave_unused):
            self._add(bucket, buffer, sent)
        average = self.average or (bool(self.open) and self._plain is None)
        world = self._active_ranks(takes_part) if self.is_joining else self.world
        before = self.predivide or (world if average else 1.0)
        after = world / before if average else 1.0
        if before != 1.0:
            sent.div_(before)

        def arrived(future: torch.futures.Future[Any]) -> torch.Tensor:
            with torch.no_grad():
                if after != 1.0:
                    sent.div_(after)
                if sent.is_sparse:
                    return sent.to(buffer.dtype)
                if widen:
                    buffer.copy_(sent)
                return buffer

        work = dist.all_reduce(sent, group=self.group, async_op=True)
        future: torch.futures.Future[torch.Tensor] = work.get_future().then(arrived)
        return future

    def _active_ranks(self, takes_part: bool) -> int:
        """By how many ranks gradients are divided while some may have run out of inputs."""
        wrapper: Any = self.wrapper()
        if divides_by_initial_world(wrapper):
            return self.world
        active = torch.full((), float(takes_part), dtype=torch.float32, device=self.device)
        dist.all_reduce(active, group=self.group)
        return int(active)

    def _add(self, bucket: Any, buffer: torch.Tensor, sent: torch.Tensor) -> None:
        """Add the gradients that are set aside to a bucket, and remember where the reduced ones will be."""
        local: list[torch.Tensor] = []
        slots: list[torch.Tensor] = []
        may_leave_unused = self._may_leave_unused
        for param, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            slot = grad
            if sent is not buffer:
                slot = sent.as_strided(grad.size(), grad.stride(), grad.storage_offset() - buffer.storage_offset())
            saved = self._take(param)
            if saved is not None:
                slots.append(slot)
                local.append(saved)
            if sent is not buffer and id(param) in self._fp32:
                self._sums.append((param, slot))
            elif may_leave_unused:
                self._views.append((param, grad))
        if local:
            if self.scale is not None:
                local = list(torch._foreach_mul(local, self.scale.to(local[0].device, non_blocking=True)))
            torch._foreach_add_(slots, local)

    def _add_sparse(self, sent: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
        """``_add`` for a bucket that holds the gradient of one sparse parameter."""
        saved = self._take(param)
        if saved is not None:
            sent = sent + (saved if self.scale is None else saved * self.scale).to(sent.dtype)
        return sent.coalesce()

    def _take(self, param: torch.Tensor) -> torch.Tensor | None:
        """Remove and return the gradient that is set aside for a parameter with fp32 gradients; None without one."""
        record = record_of(param)
        if record.saved is None or id(param) not in self._fp32:
            return None
        saved, record.saved = record.saved, None
        return saved

    def _first_bucket(self) -> None:
        """At the first bucket of a pass: have ``_place_gradients`` called when the reducer has filled ``p.grad``."""
        if self._is_averaging:
            return
        self._is_averaging = True
        self.allreduces += 1
        self._unsynced_params.clear()
        # The reducer queues a last callback of its own. One that is queued by a callback runs after it.
        queue_after_backward(lambda: queue_after_backward(self._place_gradients))

    @torch.no_grad()
    def _place_gradients(self) -> None:
        """Put the averaged gradients into ``p.grad`` where the reducer has not, or has rounded them."""
        self._is_averaging = False
        for param, total in self._sums if self.open else ():
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


@eager
def _watch_outputs(wrapper: torch.nn.Module, _: Any, outputs: Any) -> None:
    """The forward hook of a wrapper."""
    found = (one for one in REDUCTIONS if isinstance(one, Reduction) and one.wrapper() is wrapper)
    reduction = next(found, None) if torch.is_grad_enabled() else None
    if reduction is not None:
        reduction.watch(outputs)


def _communicate(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """The communication hook. Its state is weak: the wrapper owns the reducer, which owns the hook."""
    reduction: Reduction = state()
    return reduction.communicate(bucket)
