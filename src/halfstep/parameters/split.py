"""Split masters: a bfloat16 weight and an int16 remainder, which together are the 32 bits of the fp32 master.

A remainder takes 2 bytes per parameter, where an fp32 copy takes 4. User writes to the weight (``load_state_dict``, an
average, a new initialization) reach the master at once, because the weight is the upper half of the master. The
remainder is ``optimizer.state[p]["remainder"]``, so checkpoints contain it. ``kernels.storage`` has the bit arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch

from ..kernels.shards import local, rewrapped
from ..kernels.storage import Storage, after_writes, join, split, split_of
from .table import Master, OptimizerTable

__all__ = ["InState", "KeepsMasters", "adapt", "entries", "master_value", "take_back_rounding"]


@runtime_checkable
class KeepsMasters(Protocol):
    """Interface of fused optimizers, which can keep masters in their state.

    Attributes:
        state: the state of the optimizer.
        options: the ``FusedOptions``.
        table: the table of its parameters.
    """

    state: Any
    options: Any
    table: OptimizerTable

    def keep_masters(self, started: dict[int, torch.Tensor] | None = None) -> None:
        """Keep masters from now on; see ``FusedState``."""


class InState(Master):
    """A master in the state of a fused optimizer, in the form that ``adapt`` chose.

    Args:
        param: a parameter of the optimizer.
        optimizer: a weak reference to the optimizer. Each access looks up its state, because user code may replace or
            load it.

    Attributes:
        start: the value before the first step, which moves it to the state; None if the parameter has the same value.
    """

    def __init__(self, param: torch.Tensor, optimizer: Callable[[], KeepsMasters | None]) -> None:
        super().__init__(param)
        self._optimizer = optimizer
        self.start: torch.Tensor | None = None

    def _splits(self, optimizer: KeepsMasters) -> bool:
        return bool(optimizer.options.storage(self.param.dtype, self.param.device).kind == "split")

    def _kept(self) -> tuple[KeepsMasters, dict[str, Any]]:
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer, optimizer.state.get(self.param, {})

    @property
    def exists(self) -> bool:
        """True if the master holds a value that the parameter alone does not determine."""
        return self.param.requires_grad or self.start is not None or not _FORMS.isdisjoint(self._kept()[1])

    def read(self) -> torch.Tensor:
        """Return the value in a new tensor; without a master in the state, the value of the parameter."""
        optimizer, state = self._kept()
        if self.start is None or not _FORMS.isdisjoint(state):
            return master_value(self.param, state)
        value, weight = local(self.start.to(self.param.device)), local(self.param.detach())
        value = join(*split_of(value, weight)) if self._splits(optimizer) else after_writes(value, weight)
        return rewrapped(value, self.param)

    @torch.no_grad()
    def write(self, value: torch.Tensor) -> torch.Tensor:
        """Set the value, of any floating-point dtype, and return the value to write to the parameter."""
        param, (optimizer, state) = self.param, self._kept()
        if "master" in state:
            state["master"].copy_(value)
        elif "remainder" in state:
            high, low = split(local(value.to(param.device, torch.float32)))
            local(state["remainder"]).copy_(low)
            return rewrapped(high, param)
        elif optimizer.options.master_weights:
            self.start = value.to(param.device, torch.float32, copy=True)
            if self._splits(optimizer):  # a remainder that user code loads later belongs to this rounding
                return rewrapped(split(local(self.start))[0], param)
        return value.to(param.dtype)

    def begin(self) -> None:
        """Move the value to the state, at the first step of the parameter."""
        if self.start is not None:
            state = self._kept()[0].state[self.param]
            if _FORMS.isdisjoint(state):
                state["master"] = self.read()
            self.start = None

    def unsaved(self) -> torch.Tensor | None:
        """Return the value before the first step; None after it."""
        return self.start


_FORMS = frozenset(("master", "remainder"))


def entries(state: Mapping[Any, Any]) -> dict[Any, dict[str, Any]]:
    """Return the entries of ``optimizer.state``, or of the state in a state dict, that belong to parameters.

    torch allows other entries: a hook may set ``optimizer.state["calls"] = 1``, which torch saves and loads unchanged.
    """
    return {key: kept for key, kept in state.items() if isinstance(kept, dict)}


def adapt(param: torch.Tensor, state: dict[str, Any], storage: Storage) -> None:
    """Convert the master of a parameter to the form of ``storage``, with the same value.

    Args:
        param: the parameter. A conversion can change it, because the two forms round ties differently.
        state: ``optimizer.state[param]``: ``remainder`` (int16, split), ``master`` (float32, plain) or neither.
        storage: the storage of the parameter's column.
    """
    remainder, master = state.get("remainder"), state.get("master")
    if storage.kind == "split":
        if remainder is None and master is not None:
            weight = local(param.detach())
            high, low = split_of(local(master.to(param.device, torch.float32)), weight)
            weight.copy_(high)
            state["remainder"] = rewrapped(low, param)
        elif remainder is None:
            state["remainder"] = torch.zeros_like(param, dtype=torch.int16, memory_format=torch.preserve_format)
        elif remainder.device != param.device:
            state["remainder"] = remainder.to(param.device)
        state.pop("master", None)
    elif storage.kind == "plain":
        if master is None:
            state["master"] = master = master_value(param, state)
            local(param.detach()).copy_(local(master))
        elif master.device != param.device or master.dtype is not torch.float32:
            state["master"] = master.to(param.device, torch.float32)
        state.pop("remainder", None)
    else:
        state.pop("master", None)
        state.pop("remainder", None)


def master_value(param: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
    """Return the master of a parameter in a new float32 tensor, from either form in ``optimizer.state[param]``."""
    if "master" in state:
        return after_writes(state["master"].to(param.device, torch.float32), param.detach())
    if "remainder" in state and param.dtype is torch.bfloat16:
        return rewrapped(join(local(param.detach()), local(state["remainder"].to(param.device))), param)
    return param.detach().to(torch.float32, copy=True)


@torch.no_grad()
def take_back_rounding(param: torch.Tensor, remainder: torch.Tensor, master: torch.Tensor) -> None:
    """Round a weight as its split master does, for the elements whose loaded remainder matches that master.

    If user code loads fp32 weights and then casts them, torch rounds ties to even. The remainder belongs to a weight
    whose ties were rounded away from zero.

    Args:
        param: the weight, written in place.
        remainder: the loaded int16 remainder.
        master: the fp32 value of the weight before the cast, or of the optimizer's master.
    """
    weight, remainder = local(param.detach()), remainder.to(param.device)
    high, low = split(local(master))
    if weight.dtype is torch.bfloat16 and remainder.dtype is torch.int16 and remainder.shape == param.shape:
        weight.copy_(torch.where(low == local(remainder), high, weight))
