"""Split masters: a bfloat16 weight and an int16 remainder that together are the 32 bits of its fp32 master.

They need 2 bytes a parameter, where an fp32 copy needs 4. What is written to the weight from outside
(``load_state_dict``, an average, a new initialization) stays, because the weight is the upper half of the master. The
remainder is ``optimizer.state[p]["remainder"]``, so checkpoints hold it. ``kernels.storage`` has the bit arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch

from ..kernels.shards import local, rewrapped
from ..kernels.storage import Storage, honoured, join, split, split_of
from .table import Master, OptimizerTable

__all__ = ["InState", "KeepsMasters", "adapt", "entries", "master_value", "take_back_rounding"]


@runtime_checkable
class KeepsMasters(Protocol):
    """A fused optimizer: it can keep masters in its state.

    Attributes:
        state: as of any optimizer.
        options: the ``FusedOptions``.
        table: the table of its parameters.
    """

    state: Any
    options: Any
    table: OptimizerTable

    def keep_masters(self, started: dict[int, torch.Tensor] | None = None) -> None:
        """Keep masters from now on; see ``FusedState``."""


class InState(Master):
    """A master in the state of a fused optimizer, in the form that ``adapt`` gave it.

    Args:
        param: a parameter of the optimizer.
        optimizer: a weak reference to the optimizer. Its state is asked each time: users replace and load it.

    Attributes:
        start: the value before the first step, which puts it into the state; None if the parameter says it.
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
        """True if there is a value that the parameter does not say."""
        return self.param.requires_grad or self.start is not None or not _FORMS.isdisjoint(self._kept()[1])

    def read(self) -> torch.Tensor:
        """A new tensor: the value; without a master, of the parameter."""
        optimizer, state = self._kept()
        if self.start is None or not _FORMS.isdisjoint(state):
            return master_value(self.param, state)
        value, weight = local(self.start.to(self.param.device)), local(self.param.detach())
        value = join(*split_of(value, weight)) if self._splits(optimizer) else honoured(value, weight)
        return rewrapped(value, self.param)

    @torch.no_grad()
    def write(self, value: torch.Tensor) -> torch.Tensor:
        """Set the value, of any floating dtype. Returns what to write to the parameter."""
        param, (optimizer, state) = self.param, self._kept()
        if "master" in state:
            state["master"].copy_(value)
        elif "remainder" in state:
            high, low = split(local(value.to(param.device, torch.float32)))
            local(state["remainder"]).copy_(low)
            return rewrapped(high, param)
        elif optimizer.options.master_weights:
            self.start = value.to(param.device, torch.float32, copy=True)
            if self._splits(optimizer):  # a remainder that is loaded after this belongs to this weight
                return rewrapped(split(local(self.start))[0], param)
        return value.to(param.dtype)

    def begin(self) -> None:
        """Put the value into the state: the parameter steps for the first time."""
        if self.start is not None:
            state = self._kept()[0].state[self.param]
            if _FORMS.isdisjoint(state):
                state["master"] = self.read()
            self.start = None

    def unsaved(self) -> torch.Tensor | None:
        """The value before the first step."""
        return self.start


_FORMS = frozenset(("master", "remainder"))


def entries(state: Mapping[Any, Any]) -> dict[Any, dict[str, Any]]:
    """The entries of ``optimizer.state``, or of the state in a state dict, that are kept for parameters.

    torch allows others: a hook may write ``optimizer.state["calls"] = 1``, and torch saves and loads it as it is.
    """
    return {key: kept for key, kept in state.items() if isinstance(kept, dict)}


def adapt(param: torch.Tensor, state: dict[str, Any], storage: Storage) -> None:
    """Give a parameter the form of master that ``storage`` asks for, keeping the value of the one it has.

    Args:
        param: the parameter. Its value can change when one form becomes the other, which rounds ties differently.
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
    """A new float32 tensor: the master of a parameter, from either form in ``optimizer.state[param]``."""
    if "master" in state:
        return honoured(state["master"].to(param.device, torch.float32), param.detach())
    if "remainder" in state and param.dtype is torch.bfloat16:
        return rewrapped(join(local(param.detach()), local(state["remainder"].to(param.device))), param)
    return param.detach().to(torch.float32, copy=True)


@torch.no_grad()
def take_back_rounding(param: torch.Tensor, remainder: torch.Tensor, master: torch.Tensor) -> None:
    """Round a weight as its split master is rounded, where a loaded remainder shows that it is that master's.

    A model whose fp32 weights were loaded and then cast has its ties rounded to even. The remainder belongs to a weight
    whose ties were rounded away from zero.

    Args:
        param: the weight, written in place.
        remainder: int16, as it was loaded.
        master: the fp32 value of the weight before it was cast, or of the master that the optimizer had.
    """
    weight, remainder = local(param.detach()), remainder.to(param.device)
    high, low = split(local(master))
    if weight.dtype is torch.bfloat16 and remainder.dtype is torch.int16 and remainder.shape == param.shape:
        weight.copy_(torch.where(low == local(remainder), high, weight))
