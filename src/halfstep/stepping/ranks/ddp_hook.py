"""The communication hook of a DistributedDataParallel wrapper, so that ranks average whole accumulation windows.

DDP's reducer all-reduces the values of ``p.grad``, in the dtype of the model. During a backward pass the gradients of
earlier micro-steps are set aside in fp32 (``parameters.ledger``), so the hook adds them to the bucket. A block sets
them aside when it opens. For a pass without a block, a hook on the outputs of the wrapper sets them aside when the pass
begins. If DDP did not reduce the last micro-step of a window, ``ddp_sync`` averages the gradients before the step.
"""

# No postponed annotations here: torch compares the annotations of a communication hook with its own classes.
import weakref
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ...casting.dynamo import eager
from ...core.dtypes import is_half
from ...core.errors import UsageError
from ...parameters.ledger import Gradients, set_grads
from ...parameters.master_registry import keeper_of
from ...parameters.table import REDUCTIONS, OptimizerTable, Slot, record_of
from ...torch_internals.torch_compat import (
    HAS_GRAD_DTYPE,
    backward_pass_id,
    divides_by_initial_world,
    forget_used_parameters,
    has_comm_hook,
    has_rebuilt_buckets,
    outputs_of_wrapper,
    queue_after_backward,
    rebuild_buckets,
    register_comm_hook,
)
from .joining import is_joining, share_masters_after_join

__all__ = ["DDPHook", "reduction_of"]


def _register_wrapper(module: torch.nn.Module, name: str, submodule: torch.nn.Module | None) -> None:
    """Register a DDP wrapper when its model is assigned. Torch calls this for every submodule of every module."""
    if submodule is None:
        return
    if type(module).__name__ == "FullyShardedDataParallel":
        _refuse_masters(submodule)
    if isinstance(module, DistributedDataParallel) and name == "module":
        _add_reduction(module, submodule)
        module.register_forward_hook(_watch_outputs)
        share_masters_after_join(module)


def _refuse_masters(module: torch.nn.Module) -> None:
    if any(keeper_of(p) is not None for p in module.parameters()):
        raise UsageError(
            "FullyShardedDataParallel (FSDP1) was given a model whose optimizer has fp32 masters (O2). FSDP1 shards "
            "the weights, but not the masters. Wrap the model first, then make the optimizer and call amp.initialize "
            "at O0 or O1; fully_shard (FSDP2) supports masters."
        )


torch.nn.modules.module.register_module_module_registration_hook(_register_wrapper)


def _add_reduction(wrapper: DistributedDataParallel, module: torch.nn.Module) -> "DDPHook":
    """Create the communication hook of a wrapper, which lives as long as the wrapper."""
    REDUCTIONS.append(reduction := DDPHook(wrapper, module))
    weakref.finalize(wrapper, REDUCTIONS.remove, reduction).atexit = False
    return reduction


def reduction_of(wrapper: DistributedDataParallel) -> "DDPHook":
    """Return the communication hook of a wrapper. Torch copies and loads a wrapper without one: create it then."""
    found = (one for one in REDUCTIONS if isinstance(one, DDPHook) and one.wrapper() is wrapper)
    return next(found, None) or _add_reduction(wrapper, wrapper.module)


class DDPHook:
    """The communication hook of one wrapper and its state, which live as long as the wrapper.

    Args:
        wrapper: the wrapper, which already has its process group but not yet its ``module``.
        module: the model.

    Attributes:
        wrapper: a weak reference to the wrapper.
        always_fp32: send all 16-bit gradients as fp32. Gradients of parameters with masters are always sent as fp32, so
            that the sum over micro-steps is never rounded to 16 bits.
        predivide: the divisor before the sum; the rest of the world size is divided after it. None divides by the
            world size before the sum, as torch does, which avoids overflow but makes small 16-bit values smaller.
        average: False to leave the sum, divided by ``predivide`` only; see ``factor``. User code may change
            ``always_fp32``, ``predivide`` and ``average`` before the first backward pass, equally on every rank.
        params: the identities of the parameters whose gradients the wrapper averages. The wrapper keeps them alive.
        group: the process group.
        world: the size of the process group.
        device: the device of the parameters.
        hooked: True if the wrapper uses this communication hook. It does not if user code registered another hook, or
            if torch's all-reduce suffices.
        scale: the divisor of the gradients of the current backward pass; None for 1.
        open: the ``RankSync`` of each optimizer that has an open block. While a block is open, ranks send means.
        allreduces: the count of backward passes in which this hook averaged gradients.
    """

    def __init__(self, wrapper: DistributedDataParallel, module: torch.nn.Module) -> None:
        self.wrapper = weakref.ref(wrapper)
        params = [p for name, p in module.named_parameters() if name not in wrapper.parameters_to_ignore]
        self.always_fp32 = bool(getattr(wrapper, "allreduce_always_fp32", False))
        self.average = bool(getattr(wrapper, "gradient_average", True))
        divisor = getattr(wrapper, "gradient_predivide_factor", 1.0)
        self.predivide: float | None = None if divisor == 1.0 and self.average else divisor
        self.params = frozenset(map(id, params))
        self.group: dist.ProcessGroup = wrapper.process_group
        self.world = dist.get_world_size(self.group)
        self.device = params[0].device
        self.hooked = False
        self.scale: torch.Tensor | None = None
        self.open: set[object] = set()
        self.allreduces = 0
        self._fp32: set[int] = set()  # identities of parameters that get fp32 gradients
        self._unsynced_params: set[torch.Tensor] = set()
        self._is_averaging = False  # between the first bucket of a backward pass and its end
        self._sums: list[tuple[torch.Tensor, torch.Tensor]] = []  # parameters and their fp32 gradients in this pass
        self._views: list[tuple[torch.Tensor, torch.Tensor]] = []
        # During a pass without a block, the id of the pass and the gradients of parameters with masters.
        self._plain: tuple[int, Gradients] | None = None
        for param in params if HAS_GRAD_DTYPE else ():
            if param.grad is None and param.grad_dtype is not param.dtype:
                param.grad_dtype = param.dtype

    @property
    def factor(self) -> float:
        """The factor by which to multiply a mean over ranks before a step; 1.0 if the user requested the mean."""
        return 1.0 if self.average else self.world / (self.predivide or 1.0)

    @property
    def changes_gradients(self) -> bool:
        """True if the all-reduce changes gradients. A mean over one rank does not."""
        return self.world > 1 or not self.average

    @cached_property
    def has_cpu(self) -> bool:
        """True if the process group has a backend for CPU tensors, which NCCL alone is not."""
        return "cpu:" in dist.get_backend_config(self.group)

    @property
    def message_device(self) -> torch.device:
        """The device for numbers that the ranks exchange and the host reads."""
        return torch.device("cpu") if self.has_cpu else self.device

    @property
    def _may_leave_unused(self) -> bool:
        """True if DDP does not touch gradients of unused parameters, also if ranks use different parameters."""
        wrapper = self.wrapper()
        return wrapper is not None and bool(wrapper.find_unused_parameters or wrapper.static_graph)

    def holds(self, param: torch.Tensor) -> bool:
        """True if this wrapper reduces the gradient of a parameter."""
        return id(param) in self.params

    @property
    def will_sync(self) -> bool:
        """True if the latest forward pass requested an all-reduce.

        Before the first bucket arrives, and under a user's hook, no other state shows that DDP will all-reduce.
        """
        return bool(getattr(self.wrapper(), "require_forward_param_sync", False))

    def hook(self, fp32: Iterable[torch.Tensor] = ()) -> None:
        """Register the communication hook if torch's all-reduce does not suffice.

        Args:
            fp32: parameters that get fp32 gradients, on every rank.
        """
        self._fp32.update(id(p) for p in fp32 if self.holds(p))
        wrapper = self.wrapper()
        if wrapper is None or self.hooked or has_comm_hook(wrapper):
            return
        if self.always_fp32 or self.predivide is not None or not self.average or self._fp32 or self._may_leave_unused:
            register_comm_hook(wrapper, self, DDPHook.communicate)
            self.hooked = True

    # ---- around a backward pass in a block

    def watch(self, outputs: Any) -> None:
        """Hook the outputs of a forward pass so that ``_begin_plain`` runs when the backward pass begins."""
        wrapper: Any = self.wrapper()
        masters = [p for p in wrapper.module.parameters() if self.holds(p) and is_half(p) and keeper_of(p) is not None]
        if masters and self.changes_gradients:
            self.hook(masters)
        begin = weakref.WeakMethod(self._begin_plain)
        for output in outputs_of_wrapper(outputs) if masters else ():
            if output.requires_grad:
                output.register_hook(lambda _: (method := begin()) and method(masters))

    def _begin_plain(self, masters: list[torch.Tensor]) -> None:
        """Begin a backward pass. If it has no block, treat gradients of parameters with masters as a block does."""
        if self._plain is not None and self._plain[0] != backward_pass_id():
            self.abandon_plain()
        if self.open:
            return
        gradients = Gradients(OptimizerTable.of_params(masters, reduced=True))
        gradients.begin(None, set())  # no optimizer waits for this pass
        self.begin_backward(self, None, gradients.table.slots)
        self._plain = backward_pass_id(), gradients
        before = self.allreduces

        def end() -> None:
            if self._plain is not None:
                self.remember_unsynced(p for p in masters if p.grad is not None and self.allreduces == before)
                gradients.finish(None, torch.zeros((), dtype=torch.float32, device=self.device))
                self.abandon_plain()
            if self.allreduces > before:
                self.rebuild_buckets()

        # Run after the reducer's last callback and after ``_place_gradients``.
        queue_after_backward(lambda: queue_after_backward(lambda: queue_after_backward(end)))

    def abandon_plain(self) -> None:
        """Forget the pass without a block, after its end or its failure."""
        if self._plain is not None:
            self.end_backward(self)
            self._plain[1].forget()
            self._plain = None

    def begin_backward(self, sync: object, scale: torch.Tensor | None, slots: Iterable[Slot]) -> None:
        """Begin a backward pass of one optimizer.

        Args:
            sync: the ``RankSync`` of the optimizer.
            scale: see ``RankSync.begin_backward``.
            slots: see ``RankSync.begin_backward``.
        """
        if not self.hooked and self.will_sync and self.changes_gradients:
            # Under a user's communication hook, DDP sends gradients only from ``p.grad``, in the parameter's dtype.
            for param, record in [(slot.param, slot.grad) for slot in slots if self.holds(slot.param)]:
                if record.saved is not None:
                    before, record.saved = record.saved, None
                    param.grad = (before if scale is None else before * scale).to(param.dtype)
        self.scale = scale
        self.open.add(sync)
        if self.will_sync:
            self._fill_missing_gradients()

    def end_backward(self, sync: object) -> None:
        """End the backward pass of an optimizer, after its success or failure."""
        self.open.discard(sync)
        self.scale = None

    def rebuild_buckets(self) -> None:
        """Rebuild the buckets after a backward pass that the ranks averaged, while all ranks take part."""
        wrapper = self.wrapper()
        if wrapper is None or is_joining(wrapper):
            return
        views = bool(wrapper.gradient_as_bucket_view and self._fp32 and not has_rebuilt_buckets(wrapper))
        before = [(p, p.grad) for p in wrapper.module.parameters() if p.grad is not None] if views else []
        rebuild_buckets(wrapper)
        # Rebuilding makes gradients views of the new buckets, which rounds fp32 gradients: put them back.
        for param, grad in before:
            if param.grad is not None and param.grad.dtype is not grad.dtype:
                set_grads([param], [grad])

    def remember_unsynced(self, params: Iterable[torch.Tensor]) -> None:
        """Remember parameters that got gradients in a backward pass that was not averaged."""
        wrapper = self.wrapper()
        if wrapper is not None and wrapper.find_unused_parameters and not wrapper.static_graph:
            self._unsynced_params.update(params)

    def _fill_missing_gradients(self) -> None:
        """Give zeros to parameters whose gradients are set aside, before a synced pass.

        With ``find_unused_parameters`` DDP's reducer remembers the parameters that passes have used since the last
        all-reduce. It raises an internal error if such a parameter has no gradient and the current pass does not use it
        (torch 2.13).
        """
        for param in self._unsynced_params:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        self._unsynced_params.clear()

    def end_window(self) -> None:
        """Let DDP's reducer forget the parameters that unsynced passes have used, after a step or ``zero_grad``.

        The reducer would remember them until its next all-reduce, and then give a parameter that no later pass uses a
        gradient of zeros (torch 2.13). If a synced pass is still to come, the reducer must remember them.
        """
        wrapper = self.wrapper()
        if wrapper is not None and self._unsynced_params and self.hooked and not self.will_sync:
            forget_used_parameters(wrapper)
            self._unsynced_params.clear()

    # ---- during a backward pass

    @torch.no_grad()
    def communicate(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        """Add the gradients that this rank has accumulated to a bucket, then average the bucket over the ranks."""
        takes_part = backward_pass_id() != -1  # this rank has not run out of inputs
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
        world = self._active_ranks(takes_part) if is_joining(self.wrapper()) else self.world
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
        """Return the number of ranks by which to divide gradients in ``join``."""
        wrapper: Any = self.wrapper()
        if divides_by_initial_world(wrapper):
            return self.world
        active = torch.full((), float(takes_part), dtype=torch.float32, device=self.device)
        dist.all_reduce(active, group=self.group)
        return int(active)

    def _add(self, bucket: Any, buffer: torch.Tensor, sent: torch.Tensor) -> None:
        """Add the gradients that are set aside to a bucket, and remember the memory of the reduced gradients."""
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
        """Add the gradient that is set aside to a bucket with one sparse gradient; see ``_add``."""
        saved = self._take(param)
        if saved is not None:
            sent = sent + (saved if self.scale is None else saved * self.scale).to(sent.dtype)
        return sent.coalesce()

    def _take(self, param: torch.Tensor) -> torch.Tensor | None:
        """Remove and return the set-aside gradient of a parameter with fp32 gradients; None if there is none."""
        record = record_of(param)
        if record.saved is None or id(param) not in self._fp32:
            return None
        saved, record.saved = record.saved, None
        return saved

    def _first_bucket(self) -> None:
        """Queue ``_place_gradients`` at the first bucket of a pass, to run after the reducer has filled ``p.grad``."""
        if self._is_averaging:
            return
        self._is_averaging = True
        self.allreduces += 1
        self._unsynced_params.clear()
        # The reducer also queues a callback. A callback that another callback queues runs after the reducer's.
        queue_after_backward(lambda: queue_after_backward(self._place_gradients))

    @torch.no_grad()
    def _place_gradients(self) -> None:
        """Put averaged gradients into ``p.grad`` if the reducer has not done so, or has rounded them."""
        self._is_averaging = False
        for param, total in self._sums if self.open else ():
            # A parameter that no rank has used keeps no gradient instead of a gradient of zeros.
            if param.grad is not None or total.any():
                set_grads([param], [total])
        for param, view in self._views:
            if param.grad is None:
                if view.any():  # this rank's pass did not use the parameter, but an earlier pass of some rank did
                    param.grad = view.clone()
            elif param.grad.data_ptr() != view.data_ptr():
                param.grad.copy_(view)
        self._sums.clear()
        self._views.clear()


@eager
def _watch_outputs(wrapper: Any, _: Any, outputs: Any) -> None:
    """Watch the outputs of a wrapper's forward pass; the forward hook of the wrapper."""
    if torch.is_grad_enabled():
        reduction_of(wrapper).watch(outputs)
