"""The masters of one optimizer, kept outside it or in the state of a fused optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from ..core.dtypes import is_half
from ..core.errors import UsageError
from ..torch_internals.torch_compat import HAS_GRAD_DTYPE
from .held_masters import MATERIALIZED, hold, keep_held, sync_held_masters
from .ledger import Gradients
from .master_registry import keeper_of, register
from .plain import PlainMasters
from .split import KeepsMasters
from .state_dict import patch_state_init
from .table import Master, OptimizerTable

__all__ = ["MasterKeeper"]


def _reset_grad_dtypes(params: list[weakref.ref[torch.Tensor]]) -> None:
    """Reset ``grad_dtype`` of parameters whose masters no longer exist."""
    for param in [param for ref in params if (param := ref()) is not None] if HAS_GRAD_DTYPE else ():
        if param.grad is None and keeper_of(param) is None:
            param.grad_dtype = param.dtype


class MasterKeeper:
    """The fp32 masters of one optimizer's 16-bit parameters. The row of a parameter refers to its master.

    Args:
        optimizer: the optimizer, which must outlive the keeper.
        masters: True if the parameters have masters. A fused optimizer of halfstep keeps them in its state, if torch
            has ``Tensor.grad_dtype``; other optimizers find them in their groups while they step. "elsewhere" if an
            attached inner optimizer has the masters.
        originals: the initial values of masters; see ``PlainMasters``.
        own: True if the optimizer may keep masters in its state.

    Attributes:
        plain: the masters outside the optimizer; None if they are in its state, or if there are none.
        replicated: True if every rank has all masters of the keeper, so that they must be equal on every rank.
        table: the parameters of the optimizer.
        gradients: the gradients of the parameters.
    """

    def __init__(
        self,
        optimizer: Any,
        masters: bool | Literal["elsewhere"],
        originals: dict[int, torch.Tensor] | None = None,
        *,
        own: bool = True,
    ) -> None:
        self.replicated = masters is True
        self.plain: PlainMasters | None = None
        self._half: list[weakref.ref[torch.Tensor]] = []
        weakref.finalize(self, _reset_grad_dtypes, self._half).atexit = False
        if masters is True and own and HAS_GRAD_DTYPE and isinstance(optimizer, KeepsMasters):
            self.table = optimizer.table
            self.table.start(self.table.new_master, fp32_grads=True)
            optimizer.keep_masters(originals)
        else:
            self.table = OptimizerTable.of(optimizer, fp32_grads=bool(masters))
            self.plain = PlainMasters(self.table, originals) if masters is True else None
        self.gradients = Gradients(self.table)
        self.adopt()

    def keep_plain(self, originals: dict[int, torch.Tensor]) -> None:
        """Move masters out of the state of an optimizer that continues without its fused step."""
        if self.has_masters:
            before = [None if slot.master is None else slot.master.held for slot in self.table.slots]
            self.plain = PlainMasters(self.table, originals)
            for slot, held in zip(self.table.slots, before, strict=True):
                if slot.master is not None and held is not None:
                    keep_held(slot.master, held)
            self.adopt()

    @property
    def has_masters(self) -> bool:
        """True if the parameters have masters, kept here or by an inner optimizer."""
        return self.table.fp32_grads

    @property
    def optimizer(self) -> Any:
        """The optimizer."""
        return self.table.optimizer()

    def adopt(self) -> None:
        """Register masters for all current parameters of the optimizer, including new parameters."""
        self.table.refresh()
        if not self.has_masters:
            return
        if self.plain is not None:
            self.plain.adopt()
        half = self.table.halves()
        register(half, self)
        self._half[:] = [weakref.ref(p) for p in half]
        self.gradients.expect()
        patch_state_init()

    # ---- masters

    def has(self, param: torch.Tensor) -> bool:
        """True if a parameter of the optimizer has a master. A parameter that user code freezes keeps its master."""
        if not self.has_masters or not is_half(param):
            return False
        return param.requires_grad or ((master := self.find(param)) is not None and master.exists)

    def find(self, param: torch.Tensor) -> Master | None:
        """Return the master of a parameter; None if it has none, or if another optimizer has it."""
        return self.table.master_of(param)

    def master_params(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that the step updates: the ``MasterParameter`` of each parameter, or the parameter."""
        if self.plain is not None:
            self.plain.adopt()
        sync_held_masters()
        self.table.refresh()
        for param in self.table.params:
            yield self.view(param) if self.has(param) else param

    def view(self, param: torch.Tensor) -> torch.Tensor:
        """Return the master of a parameter as an fp32 parameter, the same object as long as user code holds it.

        If another rank steps the parameter and has its master (``ZeroRedundancyOptimizer``), return the parameter.
        """
        sync_held_masters(param)
        keeper: Any = keeper_of(param) or self  # an inner optimizer may have the master
        master = keeper.find(param)
        return param if master is None else hold(master, keeper.optimizer)

    def started(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return pairs of a parameter and its master's value, for masters that are not in the optimizer's state."""
        sync_held_masters(refresh=False)
        masters = [slot.master for slot in self.table.refresh() if slot.master is not None]
        return [(each.param, value) for each in masters if (value := each.unsaved()) is not None]

    # ---- around a step

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put plain masters into the optimizer's groups in place of their parameters, for the duration of the block.

        Before the block, user writes to held masters are stored; after it, held masters get the new values.
        """
        if MATERIALIZED:
            sync_held_masters(refresh=False)
        if self.plain is None or self.plain.places:
            try:
                yield
            finally:
                if MATERIALIZED:
                    sync_held_masters()
            return
        try:
            try:
                self.plain.enter()
                yield
            except KeyError as error:
                if error.args and self.plain.has_in_place(error.args[0]):
                    raise UsageError(
                        f"{type(self.optimizer).__name__}.step looked up a weight in a dict with parameters as keys. "
                        "At O2, param_groups hold fp32 masters instead of 16-bit parameters during a step. Keep the "
                        "values of a weight in self.state[p], which accepts the master, or by its index in the group."
                    ) from error
                raise
            finally:
                self.plain.leave()
        finally:
            if self.plain.places:  # Ctrl-C interrupted the inner `finally`
                self.plain.leave()
            if MATERIALIZED:
                sync_held_masters()

    @contextmanager
    def out_of_place(self) -> Iterator[None]:
        """Put the parameters back into the groups within a block of ``in_place``, for the duration of the block."""
        if self.plain is not None:
            self.plain.leave()
        yield
        if self.plain is not None:
            self.plain.enter()
