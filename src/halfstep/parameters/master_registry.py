"""The keepers of fp32 masters by parameter, for code that saves, loads or averages the weights of a model.

A parameter does not know its optimizer, and an attribute of a module would be copied with the module. So the record of
a parameter refers to the keepers of its master (``GradRecord.register``).
"""

from __future__ import annotations

import torch

from .table import Keeper, Master, record_of

__all__ = ["find_master", "is_saved_elsewhere", "keeper_of"]


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
