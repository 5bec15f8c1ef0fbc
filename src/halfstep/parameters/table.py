"""The table of one optimizer: a row for each parameter in its groups, with its master and the state of its gradient.

Only ``OptimizerTable.refresh`` checks if the parameters changed since the last step. Everything derived from them
(columns here, groups of tensors, rows of kernels) is valid as long as ``generation`` stays the same. So code that
caches such a value must compare ``generation`` before each use, and must call ``refresh`` before it compares.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, is_
from typing import Any, Protocol

import torch
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from ..core.dtypes import HALF_DTYPES
from ..kernels.shards import ORDINARY, is_sharded
from ..torch_internals.torch_compat import HAS_GRAD_DTYPE

__all__ = [
    "REDUCTIONS",
    "GradRecord",
    "Keeper",
    "Master",
    "OptimizerTable",
    "Reduces",
    "Slot",
    "record_of",
    "reduced_params",
]


class Reduces(Protocol):
    """The all-reduce of one DistributedDataParallel wrapper, from ``stepping/ranks/ddp_hook.py``.

    Attributes:
        params: identities of the parameters whose gradients it averages, which live as long as the wrapper.
    """

    params: frozenset[int]


REDUCTIONS: list[Reduces] = []
"""The communication hooks of all living wrappers, in the order of creation, which is the same on every rank."""


class Keeper(Protocol):
    """Interface of objects that keep masters: the table of an optimizer, and the fp32 values of a model's buffers.

    Attributes:
        replicated: True if every rank has all masters of the keeper, so that they must be equal on every rank.
    """

    replicated: bool

    def find(self, param: torch.Tensor) -> Master | None:
        """Return the master of a parameter; None if it has none."""


@dataclass(slots=True, eq=False)
class GradRecord:
    """The gradient state and the keepers of one parameter, shared by all optimizers that have the parameter.

    The record does not say if ``p.grad`` is scaled or ready, for two reasons. All gradients of an optimizer change
    their state together, so ``WindowState`` has one state for them (``stepping/backward.py``). And user code assigns,
    clears and moves ``p.grad`` without a call of halfstep, so a state here would have to be compared with the tensor
    that it describes at every read, and written for every parameter in every pass. Three places hold the rest:

    - ``p.grad`` itself: None if there is no gradient, and its dtype says if it is fp32 or as the pass computed it.
    - ``saved``: the gradient from before the open block.
    - ``Iteration.unscaled`` (``amp/iteration.py``), only for a ``GradScaler`` between ``unscale_`` and ``update``: the
      tensors that are already unscaled, because optimizers of one scaler may share a parameter.

    Attributes:
        saved: the gradient that is set aside while a block is open.
        image: before torch 2.13, the fp32 gradient of which the 16-bit ``p.grad`` is a rounded copy; see ``ledger``.
        keepers: weak references to the keepers of the parameter's master; see ``master_registry``.
        saved_by_model: True if the state dict of the model contains the master, so that the state dict of the optimizer
            does not.
    """

    saved: torch.Tensor | None = None
    image: Any = None
    keepers: list[weakref.ref[Keeper]] = field(default_factory=list)
    saved_by_model: bool = False

    def register(self, keeper: Keeper) -> bool:
        """Register a keeper of the parameter's master, after earlier keepers that are alive; return True if it is new.

        A model that outlives its optimizer has no masters, so the reference is weak.
        """
        there = [ref for ref in self.keepers if ref() is not None]
        if any(ref() is keeper for ref in there):
            return False
        self.saved_by_model &= bool(there)
        self.keepers = [*there, weakref.ref(keeper)]
        return True


_RECORDS: MutableMapping[torch.Tensor, GradRecord] = WeakIdKeyDictionary()


def record_of(param: torch.Tensor) -> GradRecord:
    """Return the record of a parameter's gradient, which lives as long as the parameter."""
    return _RECORDS.get(param) or _RECORDS.setdefault(param, GradRecord())


class Master:
    """The fp32 value of a 16-bit parameter: outside the optimizer (``plain.py``) or in the state of a fused optimizer
    (``split.py``). Optimizers that share a parameter share its master.

    Args:
        param: the parameter. It equals the rounded master unless user code wrote to it. The reference is weak, because
            the master of a parameter that was removed from the optimizer is kept in case the parameter comes back.

    Attributes:
        held: the master as user code holds it, for ``held_masters``; None if user code does not hold it.
    """

    def __init__(self, param: torch.Tensor) -> None:
        self._param = TensorWeakRef(param)
        self.held: Any = None

    @property
    def param(self) -> torch.Tensor:
        """The parameter."""
        param: torch.Tensor | None = self._param()
        assert param is not None
        return param

    @property
    def exists(self) -> bool:
        """True if the master holds a value that the parameter alone does not determine."""
        return True

    def read(self) -> torch.Tensor:
        """Return the value, including user writes to the parameter. The tensor may be the master's own memory."""
        raise NotImplementedError

    def write(self, value: torch.Tensor) -> torch.Tensor:
        """Set the value, and return the value to write to the parameter, in its dtype."""
        raise NotImplementedError

    def unsaved(self) -> torch.Tensor | None:
        """Return the value if the state of the optimizer does not contain it; None otherwise."""
        return self.read().detach()


@dataclass(slots=True, eq=False)
class Slot:
    """The row of one parameter of one optimizer.

    Attributes:
        param: the parameter.
        group: the index of its group in ``param_groups``.
        grad: the record of its gradient.
        fp32: True if its gradient becomes fp32 although backward passes compute it in 16 bits.
        narrow: True if a block leaves the gradient in the bfloat16 that the pass computed, unless a loss scale or
            accumulation makes it fp32. None until ``find_narrow`` decides.
        reduced: True if ranks reduce its gradient, in a wrapper's bucket or because it is sharded. Buckets and shards
            require gradients of the parameter's own dtype.
        since: the generation of the table in which the parameter was added to the optimizer.
        master: the fp32 value of a 16-bit parameter; None if it has no master, or if another rank has it.
        steps_master: True once a step wrote to the master. Later steps will do the same, so ``StepWrites`` no longer
            checks this weight.
    """

    param: torch.Tensor
    group: int
    grad: GradRecord
    fp32: bool = False
    narrow: bool | None = None
    reduced: bool = False
    since: int = 0
    master: Master | None = None
    steps_master: bool = False


_KIND = attrgetter("dtype", "requires_grad")
_generations = itertools.count(1)


@dataclass(eq=False)
class OptimizerTable:
    """The parameters of one optimizer.

    Attributes:
        optimizer: a weak reference to the optimizer.
        has_masters: True if 16-bit parameters have masters, here or in an inner optimizer, so that their gradients
            become fp32. The table is then a keeper of these parameters.
        always_fp32: True if blocks leave no gradient in bfloat16; see ``Slot.narrow``.
        new_master: a function that creates the master of a 16-bit parameter; None if parameters have no masters.
        slots: the rows, in the order of the groups.
        params: the parameters of the rows.
        generation: a number that is unique in the process and changes with every change of the rows.
        reduces: True if ranks reduce the gradient of any row.
        frozen: True while the optimizer's groups hold masters instead of parameters, so ``refresh`` must not read them.
        replicated: see ``Keeper``.

    The table keeps the masters of parameters that user code removed from the optimizer, in case they come back.
    """

    optimizer: Callable[[], Any]
    has_masters: bool = False
    new_master: Callable[[torch.Tensor], Master | None] | None = None
    slots: list[Slot] = field(default_factory=list)
    params: list[torch.Tensor] = field(default_factory=list)
    generation: int = 0
    reduces: bool = False
    frozen: bool = False
    always_fp32: bool = False
    replicated: bool = False
    _by_id: dict[int, Slot] = field(default_factory=dict)
    _gone: MutableMapping[torch.Tensor, Master] = field(default_factory=WeakIdKeyDictionary)
    _kinds: list[Any] = field(default_factory=list)
    _wrappers: list[Reduces] = field(default_factory=list)

    @classmethod
    def of(cls, optimizer: Any, *, has_masters: bool = False) -> OptimizerTable:
        """Return the table of an optimizer, which it does not keep alive."""
        table = cls(weakref.ref(optimizer), has_masters)
        table.refresh()
        return table

    @classmethod
    def of_params(cls, params: Sequence[torch.Tensor], *, reduced: bool) -> OptimizerTable:
        """Return a constant table of parameters with masters, from any optimizers.

        Args:
            params: the parameters.
            reduced: True if ranks reduce their gradients.
        """
        slots = [Slot(param, 0, record_of(param), fp32=True, reduced=reduced) for param in params]
        return cls(lambda: None, True, None, slots, list(params), reduces=reduced)

    def start(self, new_master: Callable[[torch.Tensor], Master | None] | None, *, has_masters: bool) -> list[Slot]:
        """Recompute all columns, with new masters."""
        self.new_master, self.has_masters, self._kinds = new_master, has_masters, [None]
        self._gone.clear()
        for slot in self.slots:
            slot.master = None
        return self.refresh()

    def refresh(self) -> list[Slot]:
        """Update the rows to the optimizer's groups and to the DDP wrappers around the parameters, and return them.

        Parameters are compared by identity and, if they may have masters, by dtype and ``requires_grad``. A slot stays
        the same object as long as its parameter is in the optimizer.
        """
        optimizer = None if self.frozen else self.optimizer()
        if optimizer is None:
            return self.slots
        groups = [group["params"] for group in optimizer.param_groups]
        params: list[torch.Tensor] = groups[0] if len(groups) == 1 else list(itertools.chain.from_iterable(groups))
        same = len(params) == len(self.params) and all(map(is_, params, self.params))
        kinds = list(map(_KIND, params)) if self.has_masters or self.new_master is not None else []
        if same and kinds == self._kinds and self._wrappers == REDUCTIONS:
            return self.slots
        before, found, slots, generation = self._by_id, dict[int, Slot](), list[Slot](), next(_generations)
        registered: list[weakref.ref[torch.Tensor]] = []
        reduced = set(map(id, reduced_params(params)))
        for group, members in enumerate(groups):
            for param in members:
                slot = found.get(id(param)) or before.get(id(param))
                if slot is None:
                    master = self._gone.pop(param, None)
                    slot = Slot(param, group, record_of(param), since=generation, master=master)
                slot.group, slot.reduced = group, id(param) in reduced
                slot.fp32 = self.has_masters and param.dtype in HALF_DTYPES
                # Ranks require gradients of the parameter's dtype. Other slots may keep True until `find_narrow`.
                slot.narrow = None if slot.reduced or not slot.fp32 else slot.narrow or None
                if slot.master is None and self.new_master is not None and param.dtype in HALF_DTYPES:
                    slot.master = self.new_master(param)
                if slot.fp32 and slot.grad.register(self):
                    registered.append(weakref.ref(param))
                slots.append(slot)
                found[id(param)] = slot
        for slot in self.slots:
            if slot.master is not None and id(slot.param) not in found:
                self._gone[slot.param] = slot.master
        self.slots, self._by_id, self.params = slots, found, list(params)
        self._kinds, self._wrappers, self.reduces = kinds, list(REDUCTIONS), bool(reduced)
        self.generation = generation
        if registered and HAS_GRAD_DTYPE:
            weakref.finalize(self, _reset_grad_dtypes, registered).atexit = False
        return slots

    def find_narrow(self, uses: Mapping[int, int]) -> None:
        """Decide for this generation which gradients stay in bfloat16.

        Args:
            uses: the number of times that a pass uses each parameter, by identity. The gradient becomes fp32 unless it
                is 1: autograd sums the gradients of several uses in the dtype that it delivers, and bfloat16 rounds
                every addition.
        """
        for slot in self.slots:
            found = slot.fp32 and not slot.reduced and slot.param.dtype is torch.bfloat16 and HAS_GRAD_DTYPE
            slot.narrow = found and not self.always_fp32 and uses.get(id(slot.param)) == 1

    def find(self, param: torch.Tensor) -> Master | None:
        """Return the master of a parameter, even if it was removed from the optimizer; None if it has none."""
        slot = self._by_id.get(id(param))
        return slot.master if slot is not None else self._gone.get(param) if self._gone else None

    def has_master(self, param: torch.Tensor) -> bool:
        """True if a step of the optimizer updates a master of the parameter, which user code may have frozen since."""
        if not self.has_masters or param.dtype not in HALF_DTYPES:
            return False
        return param.requires_grad or ((master := self.find(param)) is not None and master.exists)


def _reset_grad_dtypes(params: list[weakref.ref[torch.Tensor]]) -> None:
    """Reset ``grad_dtype`` of parameters whose masters no longer exist."""
    for param in [param for ref in params if (param := ref()) is not None]:
        if param.grad is None and all(ref() is None for ref in record_of(param).keepers):
            param.grad_dtype = param.dtype


def reduced_params(params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parameters whose gradients ranks reduce: parameters in a DDP wrapper, and sharded parameters."""
    if not REDUCTIONS and ORDINARY.issuperset(map(type, params)):
        return []
    in_wrappers = frozenset[int]().union(*(reduction.params for reduction in REDUCTIONS))
    return [p for p in params if id(p) in in_wrappers or is_sharded(p)]
