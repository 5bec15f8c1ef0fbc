"""Plain masters: fp32 copies of 16-bit parameters, which replace the parameters in the optimizer during a step.

Any optimizer thus updates fp32 values with fp32 state, and outside a step it is an ordinary optimizer over the model's
parameters. User writes to a parameter are found by value, before a step and when masters are read: if the parameter
differs from its rounded master, its value is copied to the master.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from operator import is_
from typing import Any

import torch

from ..core.dtypes import cast_error, is_half
from ..core.errors import UsageError
from ..core.inner_optimizers import state_holders
from ..kernels import multi_tensor
from ..kernels.multi_tensor import TensorGroups
from ..kernels.storage import after_writes
from .held_masters import sync_held_masters
from .ledger import get_grads, set_grads, widen
from .master_registry import find_master, is_saved_elsewhere
from .outside_writes import OutsideWrites, StepWrites
from .split import entries, master_value
from .table import Master, OptimizerTable, Slot

__all__ = ["Plain", "PlainMasters", "without_masters"]


class Plain(Master):
    """A master in a separate fp32 tensor.

    Args:
        param: the parameter.
        value: the initial fp32 value.

    Attributes:
        tensor: the fp32 value, as a parameter.
        dtype: the dtype of the parameter when the master was created.
        in_place: True while the tensor replaces the parameter in the groups of an optimizer that steps. The parameter
            then still has the value from before the step, so ``read`` must not copy it to the master.
    """

    def __init__(self, param: torch.Tensor, value: torch.Tensor) -> None:
        super().__init__(param)
        self.tensor, self.dtype, self.in_place = torch.nn.Parameter(value), param.dtype, False

    @torch.no_grad()
    def read(self) -> torch.Tensor:
        """Return the tensor, after copying user writes to the parameter into it."""
        if not self.in_place:
            self.tensor.copy_(after_writes(self.tensor, self.param))
        return self.tensor

    @torch.no_grad()
    def write(self, value: torch.Tensor) -> torch.Tensor:
        """Set the value, and return it rounded to the dtype of the parameter."""
        self.tensor.copy_(value)
        return self.tensor.to(self.param.dtype)


class PlainMasters:
    """The fp32 masters of one optimizer's 16-bit parameters, in the rows of its table.

    Args:
        table: the parameters of the optimizer.
        originals: the fp32 weights before they were cast, by the ``id`` of the parameter, as the initial values of
            masters. Other masters start from their parameters.

    Attributes:
        step_writes: the writes of the current step to parameters instead of masters.
        places: while masters are in the groups, pairs of a group's list of parameters and its original content; empty
            otherwise.
    """

    def __init__(self, table: OptimizerTable, originals: dict[int, torch.Tensor] | None = None) -> None:
        self.table = table
        self._generation = -1  # the generation of the table for which the next four lists are valid
        self._rows: list[Slot] = []  # rows with a master
        self._params: list[torch.Tensor] = []
        self._masters: list[Plain] = []
        self._tensors: list[torch.nn.Parameter] = []  # the tensors of the masters
        self._outside_writes = OutsideWrites([], [])
        self.places: list[tuple[list[Any], list[Any]]] = []
        self._grads: list[torch.Tensor | None] = []  # the gradients given to masters, while they are in place
        self._states: dict[int, _States] = defaultdict(_States)  # by the `id` of the optimizer
        self._holders: list[tuple[Any, _States]] = []  # while masters are in place: optimizers whose state is swapped
        self._groups = TensorGroups([])
        self.step_writes = StepWrites()
        table.start(partial(_new_master, table.optimizer, originals or {}), has_masters=True)
        table.new_master = partial(_new_master, table.optimizer, {})  # other originals belong to other optimizers

    def adopt(self) -> None:
        """Update the lists to the table.

        Raises:
            UsageError: if user code cast a weight after its master was created.
        """
        slots = self.table.refresh()
        if self._generation == self.table.generation:
            return
        self._rows = [slot for slot in slots if isinstance(slot.master, Plain)]
        self._params = [slot.param for slot in self._rows]
        self._masters = [slot.master for slot in self._rows if isinstance(slot.master, Plain)]
        self._tensors = [master.tensor for master in self._masters]
        for master in self._masters:
            if master.param.dtype is not master.dtype:
                raise cast_error(f"of shape {tuple(master.param.shape)}", master.dtype, master.param.dtype)
        self._outside_writes = OutsideWrites(self._params, self._tensors)
        self._groups = TensorGroups(self._tensors, self._params, owners=self._tensors)
        self._generation = self.table.generation

    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each parameter with its master, after copying user writes to parameters into the masters."""
        self.adopt()
        if not self.places:
            self._outside_writes.honour()
        return list(zip(self._params, self._tensors, strict=True))

    # ---- around a step

    def enter(self) -> None:
        """Replace parameters by masters in the optimizer's groups and state, and give the gradients to the masters."""
        self.adopt()
        widen(self.table.params)
        self._outside_writes.honour()
        optimizer = self.table.optimizer()
        lists = [(group["params"], list(group["params"])) for group in optimizer.param_groups]
        grads = get_grads(self._params)
        self.places, self.table.frozen = lists, True  # from here on an interrupt requires `leave`
        for master, grad in zip(self._masters, grads, strict=True):
            master.in_place, master.tensor.grad = True, grad
        self.step_writes.begin(self._rows, grads)
        of = dict(zip(map(id, self._params), self._tensors, strict=True))
        for params, before in lists:
            params[:] = [of.get(id(p), p) for p in before]  # in place, because LBFGS keeps a reference to the list
        self._holders = [(holder, self._states[id(holder)]) for holder in state_holders(optimizer)]
        for holder, states in self._holders:
            states.swap_in(holder, of)
        self._grads = grads

    def leave(self) -> None:
        """Undo ``enter``, and round every master into its parameter.

        After Ctrl-C in ``enter`` or ``leave``, call it again to finish; if nothing is left to do, it does nothing. So
        every line must be safe to run twice, and ``places`` must be cleared last.
        """
        if not self.places:
            return
        for params, before in self.places:
            params[:] = before
        for holder, states in self._holders:
            states.swap_out(holder, zip(self._params, self._tensors, strict=True))
        self._holders = []
        for param, master, grad in zip(self._params, self._tensors, self._grads):  # noqa: B905 - may be empty
            if master.grad is not grad:  # the step cleared or replaced it
                param.grad = None
                if master.grad is not None:
                    set_grads([param], [master.grad])
        self._grads = []
        for master in self._tensors:
            master.grad = None
        self.step_writes.end()
        multi_tensor.copy(self._tensors, self._params, groups=self._groups)
        for each in self._masters:
            each.in_place = False
        self.places, self.table.frozen = [], False

    def has_in_place(self, key: object) -> bool:
        """True if an object is a master that is currently in the optimizer's groups."""
        return bool(self.places) and any(key is master for master in self._tensors)

    # ---- in a checkpoint of the optimizer

    def save(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        """Add masters to the optimizer's state dict, except masters that a model's state dict contains."""
        sync_held_masters(refresh=False)
        for param, name in _names(optimizer, saved):
            master = None if is_saved_elsewhere(param) else self.table.find(param)
            if master is not None:
                saved["state"][name] = {**saved["state"].get(name, {}), "master": master.read().detach()}
        return saved

    @torch.no_grad()
    def load(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        """Load the masters that ``save`` or a fused optimizer added to a state dict."""
        for param, name in _names(optimizer, saved):
            state = saved["state"].get(name, {})
            master = self.table.find(param)
            if master is not None and not is_saved_elsewhere(param) and _has_master(state):
                master.write(state["master"] if "master" in state else master_value(param, state))


@torch.no_grad()
def _new_master(optimizer: Callable[[], Any], originals: dict[int, torch.Tensor], param: torch.Tensor) -> Plain | None:
    """Create the master of a 16-bit parameter, and convert its state to fp32; return None if the parameter is frozen.

    A frozen parameter with an original gets a master, because it was trainable before the optimizer was copied.
    Optimizers that share a parameter share its master.
    """
    start = originals.get(id(param))
    if not (param.requires_grad or start is not None):
        return None
    master = find_master(param)
    if not isinstance(master, Plain):
        weight = param.detach()
        fp32 = weight.float() if start is None else after_writes(start.to(param.device, torch.float32), weight)
        master = Plain(param, fp32)
    state = optimizer().state.get(param) or {}
    like_float64 = torch.float64, param.shape  # the state of a parameter that was float64 before the cast
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and (is_half(value) or (value.dtype, value.shape) == like_float64):
            state[name] = value.float()
    return master


class _StateByMaster(defaultdict[Any, Any]):
    """An optimizer's state during a step. It refuses to create entries for parameters that masters replace."""

    def __missing__(self, key: Any) -> Any:
        master = find_master(key) if isinstance(key, torch.Tensor) else None
        if isinstance(master, Plain) and master.in_place:
            raise UsageError(
                f"The optimizer looked up the state of a 16-bit weight of shape {tuple(key.shape)} during a step, when "
                "its fp32 master replaces it in param_groups and state: the optimizer keeps its own list of weights. "
                "Let it iterate over self.param_groups, whose parameters are the keys of its state, or train at O1, "
                "where weights are fp32."
            )
        return super().__missing__(key)


class _States:
    """An optimizer's state with two sets of keys: parameters, and masters during a step.

    Both maps have the same entries, and are kept between steps, because building a map calls ``Tensor.__hash__``, a
    Python function, for every key.
    """

    def __init__(self) -> None:
        self._outer: Any = None
        self._inner: Any = None
        self._keys: list[Any] = []
        self._entries: list[Any] = []

    def swap_in(self, optimizer: torch.optim.Optimizer, of: dict[int, torch.nn.Parameter]) -> None:
        """Replace the keys of the state by masters."""
        outer = optimizer.state
        if outer is not self._outer or not (_same(outer.values(), self._entries) and _same(outer, self._keys)):
            self._outer, self._keys, self._entries = outer, list(outer), list(outer.values())
            self._inner = _StateByMaster(dict, {of.get(id(key), key): entry for key, entry in outer.items()})
        optimizer.state = self._inner

    def swap_out(
        self, optimizer: torch.optim.Optimizer, pairs: Iterable[tuple[torch.Tensor, torch.nn.Parameter]]
    ) -> None:
        """Replace the keys of the state by parameters, and keep the changes of the step."""
        inner = optimizer.state
        if inner is not self._inner or not _same(inner.values(), self._entries):
            params = {id(master): param for param, master in pairs}
            found = {params.get(id(key), key): entry for key, entry in inner.items()}
            if inner is not self._inner:  # user code called load_state_dict during the step
                optimizer.state, self._outer = defaultdict(dict, found), None
                return
            self._outer.clear()
            self._outer.update(found)
            self._keys, self._entries = list(self._outer), list(inner.values())
        optimizer.state = self._outer


def _same(now: Iterable[Any], before: list[Any]) -> bool:
    now = list(now)
    return len(now) == len(before) and all(map(is_, now, before))


def without_masters(saved: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state dict without masters, in torch's format."""
    kept = entries(saved["state"])
    others = {name: value for name, value in saved["state"].items() if name not in kept}
    apart = {
        name: own
        for name, state in kept.items()
        if (own := {key: value for key, value in state.items() if key not in _MASTERS})
    }
    return {**saved, "state": {**apart, **others}}


_MASTERS = {"master", "remainder"}


def _has_master(state: Any) -> bool:
    return isinstance(state, dict) and not _MASTERS.isdisjoint(state)


def _names(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> list[tuple[torch.Tensor, Any]]:
    """Return pairs of an optimizer's parameter and its key in a state dict."""
    groups = zip(optimizer.param_groups, saved["param_groups"], strict=True)
    return [pair for group, names in groups for pair in zip(group["params"], names["params"], strict=True)]
