"""Masters that user code holds: fp32 parameters that are copies of the stored masters, synchronized by value.

``amp.master_params`` returns them. Stored masters can have another form (such as a bfloat16 weight and a remainder), so
a held master is a copy, allocated at its first read. User code may write to the copy in any way; comparing it with its
earlier values finds the write. ``sync_held_masters`` copies such writes to the stored master and the weight, and copies
changes of the stored master into the held master. It must run before every read or write of a stored master: it runs
before and after a step, before a forward pass of a cast model, and when masters are read, saved or loaded.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from ..core.errors import UsageError
from ..kernels.shards import is_sharded, local, rewrapped
from ..torch_internals.torch_compat import (
    DisableTorchFunction,
    StorageWeakRef,
    storage_of,
    subclass_over,
    tree_map_only,
)
from .async_reader import capturing
from .ledger import get_grads, set_grads, widen
from .master_registry import find_master
from .snapshot import bits
from .table import Master

__all__ = ["MATERIALIZED", "MasterParameter", "hold", "keep_held", "master_of", "sync_held_masters", "write_master"]


class MasterParameter(torch.nn.Parameter):
    """The fp32 master of one weight as a parameter, with the shape and device of the weight.

    Attributes:
        weight: the weight in the model.
    """

    weight: torch.Tensor

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient of the weight, the same tensor, which becomes fp32 at the first access."""
        widen([self.weight])
        return get_grads([self.weight])[0]

    @grad.setter
    def grad(self, grad: torch.Tensor | None) -> None:
        self.weight.grad = None
        if grad is not None:
            set_grads([self.weight], [grad])

    def _ordinary(self) -> torch.nn.Parameter:
        """Return a copy as an ordinary fp32 parameter."""
        return torch.nn.Parameter(self.detach().clone(), self.requires_grad)

    def __repr__(self) -> str:  # type: ignore[override]
        """Return the representation of an ordinary parameter."""
        return repr(torch.nn.Parameter(self.detach(), self.requires_grad))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        """Copy as an ordinary fp32 parameter."""
        return memo.setdefault(id(self), self._ordinary())  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as an ordinary fp32 parameter."""
        return self._ordinary().__reduce_ex__(protocol)


class LazyMaster(MasterParameter):
    """A master of which user code used only the gradient. It has no memory, so clipping allocates none.

    Any other use turns it into a ``MasterParameter`` with memory, similar to torch's lazy parameters.

    Attributes:
        fill: a function that allocates the memory. It also keeps the optimizer alive, which has the stored master.
    """

    fill: Callable[[LazyMaster], None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Allocate the memory of all lazy masters among the arguments, then call the function."""
        tree_map_only(LazyMaster, lambda master: master.fill(master), (args, kwargs))
        return func(*args, **(kwargs or {}))

    def _ordinary(self) -> torch.nn.Parameter:
        return torch.nn.Parameter(_fp32_like(self.weight, find_master(self.weight)))


def hold(master: Master, owner: object) -> torch.Tensor:
    """Return the master of a weight as an fp32 parameter, the same object as long as user code holds it.

    A materialized master is kept alive until its next synchronization, so that no write is lost if user code drops it
    after the write. From then on the reference is weak. User code also holds the master through a view, a
    ``detach()`` or a NumPy array, because the lifetime of its memory decides, not the lifetime of the object.

    Args:
        master: the stored master.
        owner: the optimizer, kept alive until the master is read, because it may have the stored master.
    """
    weight = master.param
    held: Any = None if master.held is None else master.held()
    if held is None:
        held = _sharded(master) if is_sharded(weight) else _lazy(master, owner)
    if is_sharded(weight):  # a DTensor cannot have the `grad` property of `MasterParameter`
        widen([weight])
        (held.grad,) = get_grads([weight])
    return held  # type: ignore[no-any-return]


def _lazy(master: Master, owner: object) -> LazyMaster:
    empty = torch.empty(0, dtype=torch.float32, device=master.param.device)
    made: LazyMaster = subclass_over(LazyMaster, empty, True)
    made.weight = master.param

    def fill(made: LazyMaster, _owner: object = owner) -> None:
        with torch.inference_mode(False), torch.no_grad(), DisableTorchFunction():
            weight: torch.Tensor = made.weight
            stored = find_master(weight)
            value = _fp32_like(weight, stored)
            made.__class__ = MasterParameter  # type: ignore[assignment]
            del made.fill
            made.data = value
            if stored is not None:
                keep_held(stored, _Materialized(weight, made, value.clone()))

    made.fill = fill
    keep_held(master, TensorWeakRef(made))
    return made


@torch.no_grad()
def _sharded(master: Master) -> torch.Tensor:
    """Return the materialized master of a ``DTensor``."""
    value = torch.empty_like(local(master.param.detach()), dtype=torch.float32).copy_(local(master.read()))
    made: Any = torch.nn.Parameter(rewrapped(value, master.param))
    made.weight = master.param
    keep_held(master, _Materialized(master.param, made, value.clone()))
    return made  # type: ignore[no-any-return]


def keep_held(master: Master, held: Any) -> None:
    """Set ``master.held`` to a ``_Materialized``, to a weak reference to a ``LazyMaster``, or to None."""
    master.held = held
    (MATERIALIZED.add if isinstance(held, _Materialized) else MATERIALIZED.discard)(master)


class _Materialized:
    """A held master that has memory, with its values at the latest synchronization.

    Args:
        weight: the weight in the model.
        master: the held master of the weight.
        before: the values of the master.
    """

    def __init__(self, weight: torch.Tensor, master: torch.Tensor, before: torch.Tensor) -> None:
        self._weight = weight
        self._before = before
        self._version = master._version
        self._kept: torch.Tensor | None = master  # until the next synchronization
        self._ref = TensorWeakRef(master)
        self._memory = StorageWeakRef(local(master.detach()).untyped_storage())
        self._place = _place_of(master)

    def __call__(self) -> torch.Tensor | None:
        """Return the held master, or a new object if only its memory is alive; None if user code dropped both."""
        master = self._kept if self._kept is not None else self._ref()
        if master is None and not is_sharded(self._weight):
            storage = storage_of(self._memory)
            if storage is not None:
                flat = torch.empty(0, dtype=torch.float32, device=self._weight.device)
                made: MasterParameter = subclass_over(MasterParameter, flat.set_(storage, *self._place), True)
                made.weight = self._weight
                self._ref, self._version, master = TensorWeakRef(made), made._version, made
        return master

    def sync(self, *, refresh: bool) -> bool:
        """Synchronize this master; see ``sync_held_masters``. Return True if user code still holds it."""
        master, stored = self(), find_master(self._weight)
        if master is None or stored is None:
            return master is not None
        if master.shape != self._weight.shape:
            raise UsageError(
                f"The master of a weight of shape {tuple(self._weight.shape)} was given data of shape "
                f"{tuple(master.shape)}. Its data must have the shape of the weight."
            )
        self._exchange(master, stored, refresh=refresh)
        self._version, self._place = master._version, _place_of(master)
        self._memory = StorageWeakRef(local(master.detach()).untyped_storage())
        self._kept = None
        del master
        return self._ref() is not None or storage_of(self._memory) is not None

    def _exchange(self, master: Any, source: Master, *, refresh: bool) -> None:
        """Copy elements that user code wrote to the stored master and the weight, and copy all others from there."""
        weight, before = self._weight, self._before
        if master.dtype is not torch.float32 or master.device != weight.device:  # after ``master.data = ...``
            master.data = master.data.to(weight.device, torch.float32)
        now = local(master.detach())
        unwritten = now.device.type == "cpu" and torch.equal(bits(now), bits(before))
        if unwritten and not refresh:
            return
        stored = local(source.read().detach())
        if unwritten:
            if not torch.equal(bits(stored), bits(before)):
                now.copy_(stored)
                before.copy_(stored)
            return
        value = torch.where(bits(now) != bits(before), now, stored)
        rounded = source.write(rewrapped(value, weight))
        # A new version of the weight makes the backward pass of an earlier forward pass fail. So the version changes
        # only if torch counted a write to the master; comparing values would wait for the device.
        (weight if master._version != self._version else weight.data).copy_(rounded)
        local(master.data).copy_(value)
        before.copy_(value)


MATERIALIZED: weakref.WeakSet[Master] = weakref.WeakSet()
"""The stored masters, of all optimizers, whose held master has memory."""


def sync_held_masters(weight: torch.Tensor | None = None, *, refresh: bool = True) -> None:
    """Synchronize held masters with stored masters and weights, in both directions.

    Masters on a device whose stream is captured by a CUDA graph are left alone.

    Args:
        weight: the weight whose master to synchronize; None for all held masters of all optimizers.
        refresh: False to skip the copy from stored masters, unless user code wrote to the held master.
    """
    if not MATERIALIZED:
        return
    found = MATERIALIZED if weight is None else MATERIALIZED & {find_master(weight)}
    with torch.inference_mode(False), torch.no_grad(), DisableTorchFunction():
        for master in [each for each in found if not capturing(each.param.device)]:
            try:
                is_held = master.held.sync(refresh=refresh)
            except UsageError:
                keep_held(master, None)  # its data has the wrong shape; after any other error user code still holds it
                raise
            if not is_held:
                keep_held(master, None)


def master_of(param: torch.Tensor) -> torch.Tensor | None:
    """Return the fp32 value of a parameter's master; None if it has none."""
    sync_held_masters(param)
    return None if (master := find_master(param)) is None else master.read().detach()


def write_master(param: torch.Tensor, value: torch.Tensor) -> torch.Tensor | None:
    """Set the master of a parameter, and return the value to write to the parameter; None if it has no master."""
    sync_held_masters(param)
    return None if (master := find_master(param)) is None else master.write(value)


def _fp32_like(weight: torch.Tensor, master: Master | None) -> torch.Tensor:
    """Return a new fp32 tensor with the memory format of the weight, and the value of its master or of the weight."""
    source = weight.detach() if master is None else master.read()
    return torch.empty_like(weight.detach(), dtype=torch.float32).copy_(source)


def _place_of(master: torch.Tensor) -> tuple[Any, ...]:
    """Return the place of a tensor in its storage."""
    here = local(master.detach())
    return here.storage_offset(), here.shape, here.stride()
