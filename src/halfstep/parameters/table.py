"""One table for each optimizer: a row for each parameter in its groups, with what is known about its gradient.

``OptimizerTable.refresh`` is the one place that asks whether the parameters are the same as in the last step.
Everything derived from them (columns here, groups of tensors, rows of kernels) is kept for as long as ``generation``
stays the same.
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
"""The all-reduces of the living wrappers, in the order in which these were made, which is the same on every rank."""


class Keeper(Protocol):
    """Keeps masters of some parameters, or fp32 values of some buffers.

    Attributes:
        replicated: True if it has all masters, which are then to be the same on every rank.
    """

    replicated: bool

    def find(self, param: torch.Tensor) -> Master | None:
        """The master of a parameter; None if it has none."""

    def view(self, param: torch.Tensor) -> torch.Tensor:
        """The master of a parameter as a parameter; see ``held_masters``."""


@dataclass(slots=True, eq=False)
class GradRecord:
    """State of the gradient of one parameter, shared by all optimizers that have it, and the place of its master.

    Attributes:
        saved: the gradient that is set aside while a block is open.
        block: a weak reference to the open block in which one optimizer has taken the gradient. Until the block is
            closed, or gone after an interrupt, other optimizers with the same parameter leave its gradient alone.
        image: before torch 2.13, an fp32 gradient that stands behind the 16-bit ``p.grad``; see ``ledger``.
        keepers: weak references to what keeps a master of the parameter; see ``master_registry``.
        saved_by_model: True if the state dict of the model has the master, so the state dict of the optimizer needs
            none.
    """

    saved: torch.Tensor | None = None
    block: weakref.ref[object] | None = None
    image: Any = None
    keepers: list[weakref.ref[Keeper]] = field(default_factory=list)
    saved_by_model: bool = False


_RECORDS: MutableMapping[torch.Tensor, GradRecord] = WeakIdKeyDictionary()


def record_of(param: torch.Tensor) -> GradRecord:
    """The record of a parameter's gradient; it lives as long as the parameter."""
    return _RECORDS.get(param) or _RECORDS.setdefault(param, GradRecord())


class Master:
    """The fp32 number behind a 16-bit parameter: beside the optimizer (``plain.py``) or in the state of a fused one
    (``split.py``). Optimizers that share a parameter share it.

    Args:
        param: the parameter, which is the master rounded unless something has written to it since. It is not kept
            alive, because the master of a parameter that was taken out of the optimizer waits for it.

    Attributes:
        held: the form in which user code holds it, for ``held_masters``; None if it does not.
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
        """True if there is a value that the parameter does not say."""
        return True

    def read(self) -> torch.Tensor:
        """The value, with what was written to the parameter. It may be the master's own memory."""
        raise NotImplementedError

    def write(self, value: torch.Tensor) -> torch.Tensor:
        """Set the value. Returns what to write to the parameter, in its dtype."""
        raise NotImplementedError

    def unsaved(self) -> torch.Tensor | None:
        """The value, if the state of the optimizer does not have it."""
        return self.read().detach()


@dataclass(slots=True, eq=False)
class Slot:
    """One parameter of one optimizer.

    Attributes:
        param: the parameter.
        group: the place of its group in ``param_groups``.
        grad: the record of its gradient.
        fp32: True if its gradient is to be fp32 although backward passes compute it in 16 bits.
        narrow: True if the gradient of a pass in a block stays in the bfloat16 that the pass computes it in, unless a
            loss scale or another gradient makes it fp32. None until ``find_narrow`` has found it.
        reduced: True if ranks reduce its gradient, in a wrapper's bucket or because it is sharded. Buckets and shards
            take gradients of the parameter's own dtype only.
        since: the generation of the table with which the parameter came to the optimizer.
        master: the fp32 number behind a 16-bit parameter; None without one, or if another rank has it.
        steps_master: True once a step has written to the master. A step that has done so always does, so nothing is
            asked about this weight any more.
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
        fp32_grads: True if gradients of 16-bit parameters are to be fp32, because the parameters have masters.
        always_fp32: True if no block leaves any of them in bfloat16; see ``Slot.narrow``.
        new_master: makes the master of a 16-bit parameter that has none yet; None if it is to have none.
        slots: the rows, in the order of the groups.
        params: the parameters of the rows.
        generation: a number that is unique in the process; it is another one after each change.
        reduces: True if ranks reduce the gradient of any row.
        frozen: True while masters are in the places of parameters: the groups do not say then which these are.

    Masters of parameters that were taken out of the optimizer are kept, in case the parameters come back.
    """

    optimizer: Callable[[], Any]
    fp32_grads: bool = False
    new_master: Callable[[torch.Tensor], Master | None] | None = None
    slots: list[Slot] = field(default_factory=list)
    params: list[torch.Tensor] = field(default_factory=list)
    generation: int = 0
    reduces: bool = False
    frozen: bool = False
    always_fp32: bool = False
    _by_id: dict[int, Slot] = field(default_factory=dict)
    _gone: MutableMapping[torch.Tensor, Master] = field(default_factory=WeakIdKeyDictionary)
    _kinds: list[Any] = field(default_factory=list)
    _wrappers: list[Reduces] = field(default_factory=list)

    @classmethod
    def of(cls, optimizer: Any, *, fp32_grads: bool = False) -> OptimizerTable:
        """The table of an optimizer, which may die before it."""
        table = cls(weakref.ref(optimizer), fp32_grads)
        table.refresh()
        return table

    @classmethod
    def of_params(cls, params: Sequence[torch.Tensor], *, reduced: bool) -> OptimizerTable:
        """Return a table of parameters with masters, from any optimizers. It never changes.

        Args:
            params: the parameters.
            reduced: True if ranks reduce their gradients.
        """
        slots = [Slot(param, 0, record_of(param), fp32=True, reduced=reduced) for param in params]
        return cls(lambda: None, True, None, slots, list(params), reduces=reduced)

    def start(self, new_master: Callable[[torch.Tensor], Master | None] | None, *, fp32_grads: bool) -> list[Slot]:
        """Make all columns anew, with other masters."""
        self.new_master, self.fp32_grads, self._kinds = new_master, fp32_grads, []
        self._gone.clear()
        for slot in self.slots:
            slot.master = None
        return self.refresh()

    def refresh(self) -> list[Slot]:
        """Bring the rows up to date with the groups, and with the wrappers around parameters.

        A parameter is compared by identity, dtype and ``requires_grad``. A slot stays the same object for as long as
        its parameter is in the optimizer.
        """
        optimizer = None if self.frozen else self.optimizer()
        if optimizer is None:
            return self.slots
        groups = [group["params"] for group in optimizer.param_groups]
        params: list[torch.Tensor] = groups[0] if len(groups) == 1 else list(itertools.chain.from_iterable(groups))
        same = len(params) == len(self.params) and all(map(is_, params, self.params))
        kinds = list(map(_KIND, params))
        if same and kinds == self._kinds and self._wrappers == REDUCTIONS:
            return self.slots
        known, found, generation = self._by_id, {}, next(_generations)
        reduced = set(map(id, reduced_params(params)))
        slots = []
        for group, members in enumerate(groups):
            for param in members:
                slot = known.get(id(param))
                if slot is None:
                    master = self._gone.pop(param, None)
                    slot = Slot(param, group, record_of(param), since=generation, master=master)
                slot.group, slot.reduced = group, id(param) in reduced
                slot.fp32 = self.fp32_grads and param.dtype in HALF_DTYPES
                # Ranks take gradients of the parameter's dtype. Any other may have one in bfloat16 to add up.
                slot.narrow = None if slot.reduced or not slot.fp32 else slot.narrow or None
                if slot.master is None and self.new_master is not None and param.dtype in HALF_DTYPES:
                    slot.master = self.new_master(param)
                slots.append(slot)
                found[id(param)] = slot
        for slot in self.slots:
            if slot.master is not None and id(slot.param) not in found:
                self._gone[slot.param] = slot.master
        self.slots, self._by_id, self.params = slots, found, list(params)
        self._kinds, self._wrappers, self.reduces = kinds, list(REDUCTIONS), bool(reduced)
        self.generation = generation
        return slots

    def find_narrow(self, uses: Mapping[int, int]) -> None:
        """Find the gradients that stay in bfloat16, for this generation.

        Args:
            uses: in how many places a pass uses each parameter, by identity. If in several, or in none, the gradient is
                fp32: autograd adds up the gradients of the places in the dtype that it delivers, and a sum in bfloat16
                is rounded at each of them.
        """
        for slot in self.slots:
            found = slot.fp32 and not slot.reduced and slot.param.dtype is torch.bfloat16 and HAS_GRAD_DTYPE
            slot.narrow = found and not self.always_fp32 and uses.get(id(slot.param)) == 1

    def master_of(self, param: torch.Tensor) -> Master | None:
        """The master of a parameter, also of one that was taken out of the optimizer; None without one."""
        slot = self._by_id.get(id(param))
        return slot.master if slot is not None else self._gone.get(param) if self._gone else None

    def halves(self) -> list[torch.Tensor]:
        """The parameters of 16 bits."""
        return [param for param in self.params if param.dtype in HALF_DTYPES]


def reduced_params(params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The parameters whose gradients ranks reduce: in a wrapper, or sharded."""
    if not REDUCTIONS and ORDINARY.issuperset(map(type, params)):
        return []
    in_wrappers = frozenset[int]().union(*(reduction.params for reduction in REDUCTIONS))
    return [p for p in params if id(p) in in_wrappers or is_sharded(p)]
