"""Masters that user code holds: fp32 parameters with memory of their own, compared by value with what is stored.

``amp.master_params`` gives them out. The stored masters have other forms (a remainder beside a bfloat16 weight, for
example), so a held one is a copy, made at its first read. A write into it, in any spelling, is
found by comparing it with its earlier values. ``settle`` carries the write to the stored master and to the weight,
and brings what has changed there into the copy. It runs before and after a step, before a forward pass of a model that
was cast, and wherever masters are read, saved or loaded.
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

__all__ = ["WITH_MEMORY", "MasterParameter", "hold", "keep_held", "master_of", "settle", "write_master"]


class MasterParameter(torch.nn.Parameter):
    """The fp32 master of one weight as a parameter, in the shape and on the device of the weight.

    Attributes:
        weight: the weight in the model.
    """

    weight: torch.Tensor

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient of the weight, in fp32 from here on: it is the same tensor."""
        widen([self.weight])
        return get_grads([self.weight])[0]

    @grad.setter
    def grad(self, grad: torch.Tensor | None) -> None:
        self.weight.grad = None
        if grad is not None:
            set_grads([self.weight], [grad])

    def _ordinary(self) -> torch.nn.Parameter:
        """A copy that is no master of anything."""
        return torch.nn.Parameter(self.detach().clone(), self.requires_grad)

    def __repr__(self) -> str:  # type: ignore[override]
        """Return the representation that any parameter has."""
        return repr(torch.nn.Parameter(self.detach(), self.requires_grad))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        """An ordinary fp32 parameter."""
        return memo.setdefault(id(self), self._ordinary())  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as an ordinary fp32 parameter."""
        return self._ordinary().__reduce_ex__(protocol)


class UnreadMaster(MasterParameter):
    """A master of which nothing but the gradient was used yet. It has no memory, so that clipping costs none.

    At the first other use it becomes a ``MasterParameter`` with memory, as a lazy parameter of torch does.

    Attributes:
        fill: gives it its memory, and keeps the optimizer, which has the stored master, until then.
    """

    fill: Callable[[UnreadMaster], None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Any use by torch: all masters among the arguments get their memory first."""
        tree_map_only(UnreadMaster, lambda master: master.fill(master), (args, kwargs))
        return func(*args, **(kwargs or {}))

    def _ordinary(self) -> torch.nn.Parameter:
        return torch.nn.Parameter(_fp32_like(self.weight, find_master(self.weight)))


def hold(master: Master, owner: object) -> torch.Tensor:
    """The master of a weight as a parameter; the same object as long as user code holds it.

    A master with memory is kept until it is settled, so that no write is lost if its last user drops it, and held
    weakly from then on. Its memory counts, not the object: a view, a ``detach()`` or an array of it holds it too.

    Args:
        master: the master of a weight.
        owner: the optimizer, which must live until the master is read, so that it can be read.
    """
    weight = master.param
    held: Any = None if master.held is None else master.held()
    if held is None:
        held = _sharded(master) if is_sharded(weight) else _unread(master, owner)
    if is_sharded(weight):  # no property of a DTensor can be replaced
        widen([weight])
        (held.grad,) = get_grads([weight])
    return held  # type: ignore[no-any-return]


def _unread(master: Master, owner: object) -> UnreadMaster:
    empty = torch.empty(0, dtype=torch.float32, device=master.param.device)
    made: UnreadMaster = subclass_over(UnreadMaster, empty, True)
    made.weight = master.param

    def fill(made: UnreadMaster, _owner: object = owner) -> None:
        with torch.inference_mode(False), torch.no_grad(), DisableTorchFunction():
            weight: torch.Tensor = made.weight
            stored = find_master(weight)
            value = _fp32_like(weight, stored)
            made.__class__ = MasterParameter  # type: ignore[assignment]
            del made.fill
            made.data = value
            if stored is not None:
                keep_held(stored, _InMemory(weight, made, value.clone()))

    made.fill = fill
    keep_held(master, TensorWeakRef(made))
    return made


@torch.no_grad()
def _sharded(master: Master) -> torch.Tensor:
    """The master of a ``DTensor``, which has memory from the start."""
    value = torch.empty_like(local(master.param.detach()), dtype=torch.float32).copy_(local(master.read()))
    made: Any = torch.nn.Parameter(rewrapped(value, master.param))
    made.weight = master.param
    keep_held(master, _InMemory(master.param, made, value.clone()))
    return made  # type: ignore[no-any-return]


def keep_held(master: Master, held: Any) -> None:
    """Let users hold a master from now on: by an ``_InMemory``, or by a reference to one that was not read."""
    master.held = held
    (WITH_MEMORY.add if isinstance(held, _InMemory) else WITH_MEMORY.discard)(master)


class _InMemory:
    """A master that has memory: its holder, and its values when it was last settled.

    Args:
        weight: the weight in the model.
        master: the master of the weight, as a parameter.
        before: the values of the master.
    """

    def __init__(self, weight: torch.Tensor, master: torch.Tensor, before: torch.Tensor) -> None:
        self._weight = weight
        self._before = before
        self._version = master._version
        self._kept: torch.Tensor | None = master  # until it is settled
        self._ref = TensorWeakRef(master)
        self._memory = StorageWeakRef(local(master.detach()).untyped_storage())
        self._place = _place_of(master)

    def __call__(self) -> torch.Tensor | None:
        """The parameter, or a new one if only its memory lives; None if neither lives."""
        master = self._kept if self._kept is not None else self._ref()
        if master is None and not is_sharded(self._weight):
            storage = storage_of(self._memory)
            if storage is not None:
                flat = torch.empty(0, dtype=torch.float32, device=self._weight.device)
                made: MasterParameter = subclass_over(MasterParameter, flat.set_(storage, *self._place), True)
                made.weight = self._weight
                self._ref, self._version, master = TensorWeakRef(made), made._version, made
        return master

    def settle(self, *, refresh: bool) -> bool:
        """``settle`` for this master. Returns whether anybody but this holds it."""
        master, stored = self(), find_master(self._weight)
        if master is None or stored is None:
            return master is not None
        if master.shape != self._weight.shape:
            raise UsageError(
                f"The master of a weight of shape {tuple(self._weight.shape)} was given data of shape "
                f"{tuple(master.shape)}. Give it data of the shape of its weight."
            )
        self._exchange(master, stored, refresh=refresh)
        self._version, self._place = master._version, _place_of(master)
        self._memory = StorageWeakRef(local(master.detach()).untyped_storage())
        self._kept = None
        del master
        return self._ref() is not None or storage_of(self._memory) is not None

    def _exchange(self, master: Any, source: Master, *, refresh: bool) -> None:
        """Elements that were written go to the stored master and the weight, all others come from there."""
        weight, before = self._weight, self._before
        if master.dtype is not torch.float32 or master.device != weight.device:  # by ``master.data = ...``
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
        # A new version makes a saved forward pass fail, so there is none where it is not known that something changed:
        # looking at values that are on a device would wait for it.
        (weight if master._version != self._version else weight.data).copy_(rounded)
        local(master.data).copy_(value)
        before.copy_(value)


WITH_MEMORY: weakref.WeakSet[Master] = weakref.WeakSet()
"""The masters that ``settle`` has to look at, of every optimizer."""


def settle(weight: torch.Tensor | None = None, *, refresh: bool = True) -> None:
    """Settle the master of one weight, or all that have memory: of every optimizer, as a script may hold several's.

    Nothing is settled while a CUDA graph of steps on the device of a master is being recorded.
    """
    if not WITH_MEMORY:
        return
    found = WITH_MEMORY if weight is None else WITH_MEMORY & {find_master(weight)}
    with torch.inference_mode(False), torch.no_grad(), DisableTorchFunction():
        for master in [each for each in found if not capturing(each.param.device)]:
            try:
                is_held = master.held.settle(refresh=refresh)
            except UsageError:
                keep_held(master, None)  # it can be the master no more; after any other error it still is
                raise
            if not is_held:
                keep_held(master, None)


def master_of(param: torch.Tensor) -> torch.Tensor | None:
    """The fp32 value of a parameter's master; None if it has none."""
    settle(param)
    return None if (master := find_master(param)) is None else master.read().detach()


def write_master(param: torch.Tensor, value: torch.Tensor) -> torch.Tensor | None:
    """Set the master of a parameter. Returns what to write to the parameter itself; None if it has no master."""
    settle(param)
    return None if (master := find_master(param)) is None else master.write(value)


def _fp32_like(weight: torch.Tensor, master: Master | None) -> torch.Tensor:
    """A new fp32 tensor that lies in memory as the weight does, with the value of a master, or else of the weight."""
    source = weight.detach() if master is None else master.read()
    return torch.empty_like(weight.detach(), dtype=torch.float32).copy_(source)


def _place_of(master: torch.Tensor) -> tuple[Any, ...]:
    """Return the place of a tensor in its storage."""
    here = local(master.detach())
    return here.storage_offset(), here.shape, here.stride()
