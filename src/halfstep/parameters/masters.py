"""The masters of one optimizer, wherever they are kept: outside the optimizer or in the state of a fused optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from ..core.errors import UsageError
from ..torch_internals.torch_compat import HAS_GRAD_DTYPE
from .held_masters import MATERIALIZED, hold, keep_held, sync_held_masters
from .master_registry import keeper_of
from .plain import PlainMasters
from .split import KeepsMasters
from .state_dict import patch_state_init
from .table import OptimizerTable

__all__ = ["held_master", "in_place", "master_params", "move_outside", "out_of_place", "table_of", "unsaved"]


def table_of(
    optimizer: Any,
    masters: bool | Literal["elsewhere"],
    originals: dict[int, torch.Tensor] | None = None,
    *,
    own: bool = True,
) -> tuple[OptimizerTable, PlainMasters | None]:
    """Return the table of an optimizer, with masters of its 16-bit parameters.

    Args:
        optimizer: the optimizer, which must outlive the table.
        masters: True if the parameters have masters. A fused optimizer of halfstep keeps them in its state, if torch
            has ``Tensor.grad_dtype``; other optimizers find them in their groups while they step. "elsewhere" if an
            attached inner optimizer has the masters.
        originals: the initial values of masters; see ``PlainMasters``.
        own: True if the optimizer may keep masters in its state.

    Returns:
        The table, and the masters outside the optimizer; None if they are in its state, or if there are none.
    """
    if masters:
        patch_state_init()
    if masters is not True:
        return OptimizerTable.of(optimizer, has_masters=bool(masters)), None
    if own and HAS_GRAD_DTYPE and isinstance(optimizer, KeepsMasters):
        table = optimizer.table
        table.start(table.new_master, has_masters=True)
        optimizer.keep_masters(originals)
        return table, None
    table = OptimizerTable.of(optimizer)
    return table, PlainMasters(table, originals)


def move_outside(table: OptimizerTable, originals: dict[int, torch.Tensor]) -> PlainMasters:
    """Move masters out of the state of an optimizer that continues without its fused step."""
    before = [None if slot.master is None else slot.master.held for slot in table.slots]
    plain = PlainMasters(table, originals)
    for slot, held in zip(table.slots, before, strict=True):
        if slot.master is not None and held is not None:
            keep_held(slot.master, held)
    return plain


def held_master(param: torch.Tensor) -> torch.Tensor:
    """Return the master of a parameter as an fp32 parameter, the same object as long as user code holds it.

    If another rank steps the parameter and has its master (``ZeroRedundancyOptimizer``), return the parameter.
    """
    sync_held_masters(param)
    keeper: Any = keeper_of(param)
    master = None if keeper is None else keeper.find(param)
    return param if master is None else hold(master, keeper.optimizer())


def master_params(table: OptimizerTable) -> Iterator[torch.Tensor]:
    """Yield the tensors that a step updates: the ``MasterParameter`` of each parameter, or the parameter."""
    sync_held_masters()
    table.refresh()
    for param in table.params:
        yield held_master(param) if table.has_master(param) else param


def unsaved(table: OptimizerTable) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return pairs of a parameter and its master's value, for masters that are not in the optimizer's state."""
    sync_held_masters(refresh=False)
    masters = [slot.master for slot in table.refresh() if slot.master is not None]
    return [(each.param, value) for each in masters if (value := each.unsaved()) is not None]


@contextmanager
def in_place(plain: PlainMasters | None) -> Iterator[None]:
    """Put masters into the optimizer's groups in place of their parameters, for the duration of the block.

    Before the block, user writes to held masters are stored; after it, held masters get the new values.

    Args:
        plain: the masters outside the optimizer; None if it finds its masters in its state, or has none.
    """
    if MATERIALIZED:
        sync_held_masters(refresh=False)
    if plain is None or plain.places:
        try:
            yield
        finally:
            if MATERIALIZED:
                sync_held_masters()
        return
    try:
        try:
            plain.enter()
            yield
        except KeyError as error:
            if error.args and plain.has_in_place(error.args[0]):
                raise UsageError(
                    f"{type(plain.table.optimizer()).__name__}.step looked up a weight in a dict with parameters as "
                    "keys. At O2, param_groups hold fp32 masters instead of 16-bit parameters during a step. Keep the "
                    "values of a weight in self.state[p], which accepts the master, or by its index in the group."
                ) from error
            raise
        finally:
            plain.leave()
    finally:
        if plain.places:  # Ctrl-C interrupted the inner `finally`
            plain.leave()
        if MATERIALIZED:
            sync_held_masters()


@contextmanager
def out_of_place(plain: PlainMasters | None) -> Iterator[None]:
    """Put the parameters back into the groups within a block of ``in_place``, for the duration of the block."""
    if plain is not None:
        plain.leave()
    yield
    if plain is not None:
        plain.enter()
