"""The keepers of fp32 masters by parameter, for code that saves, loads or averages the weights of a model.

A parameter does not know its optimizer, and an attribute of a module would be copied with the module. So the record of
a parameter has weak references to keepers: a model that outlives its optimizer has no masters.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from .table import Keeper, Master, record_of

__all__ = ["find_master", "is_saved_elsewhere", "keeper_of", "register"]


def register(params: Iterable[torch.Tensor], keeper: Keeper) -> None:
    """Register a keeper for the masters of some parameters. A parameter's earlier living keeper has precedence."""
    for param in params:
        record = record_of(param)
        there = [ref for ref in record.keepers if ref() is not None and ref() is not keeper]
        record.saved_by_model &= bool(there)
        record.keepers = [*there, weakref.ref(keeper)]


def keeper_of(param: torch.Tensor) -> Keeper | None:
    """Return the keeper of a parameter's master; None if the parameter has no living keeper."""
    return next((keeper for ref in record_of(param).keepers if (keeper := ref()) is not None), None)


def find_master(param: torch.Tensor) -> Master | None:
    """Return the master of a parameter; None if it has none."""
    keeper = keeper_of(param)
    return None if keeper is None else keeper.find(param)


def is_saved_elsewhere(param: torch.Tensor) -> bool:
    """True if the state dict with a parameter's master is not the state dict of the optimizer."""
    return record_of(param).saved_by_model and keeper_of(param) is not None
