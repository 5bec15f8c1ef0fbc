"""Masters that users hold: each is an fp32 parameter with memory of its own, compared by value with what is stored.

``amp.master_params`` gives them out. The stored masters have other forms (a remainder beside a bfloat16 weight, for
example), so a held one is a copy, made when somebody reads it first. What was written into it, by whatever spelling, is
found by comparing it with what it was. ``settle`` carries that to the stored master and to the weight, and brings what
has changed there into the copy. It runs before and after a step, before a forward pass of a model that was cast, and
wherever masters are read, saved or loaded.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from ..core.dtypes import is_half
from ..core.errors import UsageError
from ..core.torch_compat import DisableTorchFunction, StorageWeakRef, storage_of, subclass_over, tree_map_only
from ..kernels.shards import is_sharded, local, rewrapped
from .async_reader import capturing
from .ledger import get_grads, set_grads, widen
from .master_registry import keeper_of

__all__ = ["WITH_MEMORY", "HeldMasters", "MasterParameter", "settle"]


class MasterParameter(torch.nn.Parameter):
    """The fp32 master of one weight as a parameter, in the shape and on the device of the weight.

    Attributes:
        weight: the weight in the model.
    """

    weight: torch.Tensor

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient of the weight, in fp32 from here on."""
        (grad,) = get_grads([self.weight])
        if grad is not None and is_half(grad):
            widen([self.weight])
            (grad,) = get_grads([self.weight])
        return grad

    @grad.setter
    def grad(self, grad: torch.Tensor | None) -> None:
        if grad is None:
            self.weight.grad = None
        else:
            set_grads([self.weight], [grad])

    def _ordinary(self) -> torch.nn.Parameter:
        """A copy that is no master of anything."""
        return torch.nn.Parameter(self.detach().clone(), self.requires_grad)

    def __repr__(self) -> str:  # type: ignore[override]
        """As of any parameter."""
        return repr(torch.nn.Parameter(self.detach(), self.requires_grad))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        """An ordinary fp32 parameter."""
        if id(self) not in memo:
            memo[id(self)] = self._ordinary()
        return memo[id(self)]  # type: ignore[no-any-return]

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
        keeper = keeper_of(self.weight)
        value = None if keeper is None else keeper.stored(self.weight)
        return torch.nn.Parameter(_fp32_like(self.weight, value))


class HeldMasters:
    """The masters of one optimizer that users hold.

    A master with memory is kept until it is settled, so that no write is lost if its last user drops it, and held
    weakly from then on. Its memory counts, not the object: a view, a ``detach()`` or an array of it holds it too.
    """

    def __init__(self) -> None:
        self._unread: dict[int, TensorWeakRef] = {}
        self._in_memory: dict[int, _InMemory] = {}

    def of(self, weight: torch.Tensor, owner: object) -> torch.Tensor:
        """The master of a weight as a parameter; the same object as long as somebody holds it.

        Args:
            weight: one whose keeper has a master of it.
            owner: what must live as long as the master is not read, so that it can be: the optimizer.
        """
        found = self._in_memory.get(id(weight))
        master = self._known(weight) if found is None else found.master()
        if master is None:
            master = self._sharded(weight) if is_sharded(weight) else self._made(weight, owner)
        if is_sharded(weight):  # no property of a DTensor can be replaced
            widen([weight])
            (master.grad,) = get_grads([weight])
        return master

    def _known(self, weight: torch.Tensor) -> torch.Tensor | None:
        ref = self._unread.get(id(weight))
        master: Any = None if ref is None else ref()
        return master if master is not None and master.weight is weight else None

    def _made(self, weight: torch.Tensor, owner: object) -> UnreadMaster:
        empty = torch.empty(0, dtype=torch.float32, device=weight.device)
        master: UnreadMaster = subclass_over(UnreadMaster, empty, True)
        master.weight = weight

        def fill(master: UnreadMaster, _owner: object = owner) -> None:
            with torch.inference_mode(False), torch.no_grad(), DisableTorchFunction():
                self._fill(master)

        master.fill = fill
        self._unread[id(weight)] = TensorWeakRef(master)
        return master

    def _fill(self, master: UnreadMaster) -> None:
        weight: torch.Tensor = master.weight
        keeper = keeper_of(weight)
        value = _fp32_like(weight, None if keeper is None else keeper.stored(weight))
        master.__class__ = MasterParameter  # type: ignore[assignment]
        del master.fill
        master.data = value
        self._hold(weight, master, value)

    @torch.no_grad()
    def _sharded(self, weight: torch.Tensor) -> torch.Tensor:
        """The master of a ``DTensor``, which has memory from the start."""
        keeper = keeper_of(weight)
        assert keeper is not None
        value = _fp32_like(local(weight), local(keeper.stored(weight)))  # type: ignore[arg-type]
        master: Any = torch.nn.Parameter(rewrapped(value, weight))
        master.weight = weight
        self._hold(weight, master, value)
        return master  # type: ignore[no-any-return]

    def _hold(self, weight: torch.Tensor, master: torch.Tensor, value: torch.Tensor) -> None:
        self._unread.pop(id(weight), None)
        self._in_memory[id(weight)] = _InMemory(weight, master, value.clone())
        WITH_MEMORY.add(self)

    @property
    def capturing(self) -> bool:
        """Whether a CUDA graph of steps on the device of these masters is being recorded."""
        return any(capturing(held.device) for held in list(self._in_memory.values())[:1])

    def settle(self, weight: torch.Tensor | None, *, refresh: bool) -> None:
        """``settle`` for these masters."""
        for key in list(self._in_memory) if weight is None else self._in_memory.keys() & {id(weight)}:
            try:
                is_held = self._in_memory[key].settle(refresh=refresh)
            except UsageError:
                del self._in_memory[key]  # it can be the master no more; after any other error it still is
                raise
            if not is_held:
                del self._in_memory[key]
        if not self._in_memory:
            WITH_MEMORY.discard(self)


class _InMemory:
    """A master that has memory: who keeps it, and what it was when it was last settled.

    Args:
        weight: the weight in the model.
        master: its master, as a parameter.
        before: what the master was.
    """

    def __init__(self, weight: torch.Tensor, master: torch.Tensor, before: torch.Tensor) -> None:
        self._weight = weight
        self.device = weight.device
        self._before = before
        self._version = master._version
        self._kept: torch.Tensor | None = master  # until it is settled
        self._ref = TensorWeakRef(master)
        self._memory = StorageWeakRef(local(master.detach()).untyped_storage())
        self._place = _place_of(master)

    def master(self) -> torch.Tensor | None:
        """The parameter, or a new one if only its memory lives; None if nobody has it any more."""
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
        master, keeper = self.master(), keeper_of(self._weight)
        if master is None or keeper is None:
            return master is not None
        if master.shape != self._weight.shape:
            raise UsageError(
                f"The master of a weight of shape {tuple(self._weight.shape)} was given data of shape "
                f"{tuple(master.shape)}. Give it data of the shape of its weight."
            )
        self._exchange(master, keeper, refresh=refresh)
        self._version, self._place = master._version, _place_of(master)
        self._memory = StorageWeakRef(local(master.detach()).untyped_storage())
        self._kept = None
        del master
        return self._ref() is not None or storage_of(self._memory) is not None

    def _exchange(self, master: Any, keeper: Any, *, refresh: bool) -> None:
        """Elements that were written go to the stored master and the weight, all others come from there."""
        weight, before = self._weight, self._before
        if master.dtype is not torch.float32 or master.device != weight.device:  # by ``master.data = ...``
            master.data = master.data.to(weight.device, torch.float32)
        now = local(master.detach())
        unwritten = now.device.type == "cpu" and torch.equal(_bits(now), _bits(before))
        if unwritten and not refresh:
            return
        stored = keeper.stored(weight)
        if stored is None:
            return
        stored = local(stored)
        if unwritten:
            if not torch.equal(_bits(stored), _bits(before)):
                now.copy_(stored)
                before.copy_(stored)
            return
        value = torch.where(_bits(now) != _bits(before), now, stored)
        rounded = keeper.store(weight, rewrapped(value, weight))
        # A new version makes a saved forward pass fail, so there is none where it is not known that something changed:
        # looking at values that are on a device would wait for it.
        (weight if master._version != self._version else weight.data).copy_(rounded)
        local(master.data).copy_(value)
        before.copy_(value)


WITH_MEMORY: weakref.WeakSet[HeldMasters] = weakref.WeakSet()
"""Those that have something to settle, of every optimizer."""


def settle(weight: torch.Tensor | None = None, *, refresh: bool = True) -> None:
    """Settle the master of one weight, or all that have memory: of every optimizer, as a script may hold several's."""
    if not WITH_MEMORY:
        return
    with torch.inference_mode(False), torch.no_grad(), DisableTorchFunction():
        for held in list(WITH_MEMORY):
            if not held.capturing:
                held.settle(weight, refresh=refresh)


def _fp32_like(weight: torch.Tensor, value: torch.Tensor | None) -> torch.Tensor:
    """A new fp32 tensor that lies in memory as the weight does, with a value, or that of the weight."""
    source = weight.detach() if value is None else value
    return torch.empty_like(weight.detach(), dtype=torch.float32).copy_(source)


def _place_of(master: torch.Tensor) -> tuple[Any, ...]:
    """Where a tensor lies in its storage."""
    here = local(master.detach())
    return here.storage_offset(), here.shape, here.stride()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32)
