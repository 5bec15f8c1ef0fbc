"""Which keeper has the fp32 master of a parameter: asked by whatever saves, loads or averages the weights of a model.

A parameter does not know its optimizer, and what hangs on a module would be copied with it. So this map is weak on both
sides: a model that outlives its optimizer has no masters any more.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, MutableMapping
from typing import Protocol

import torch
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["Keeper", "keeper_of", "master_of", "register", "write_master"]


class Keeper(Protocol):
    """Keeps masters of some parameters.

    Attributes:
        replicated: whether it has all masters, which are then to be the same on every rank.
        saved_elsewhere: identities of parameters whose masters the optimizer does not save, but their model.
    """

    replicated: bool
    saved_elsewhere: set[int]

    def master(self, param: torch.Tensor) -> torch.Tensor | None:
        """The fp32 value of a parameter's master, which may be the master's own memory; None if it has none."""

    def write_master(self, param: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Set the master of a parameter that has one. Returns what to write to the parameter itself, in its dtype."""

    def stored(self, param: torch.Tensor) -> torch.Tensor | None:
        """``master``, without what users have written to a master that they hold (``held_masters``) since then."""

    def store(self, param: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """``write_master``; users who hold the master do not see it yet."""


_KEEPERS: MutableMapping[torch.Tensor, list[weakref.ref[Keeper]]] = WeakIdKeyDictionary()


def register(params: Iterable[torch.Tensor], keeper: Keeper) -> None:
    """Ask this keeper for the masters of some parameters from now on. An earlier living keeper is asked first."""
    for param in params:
        there = [ref for ref in _KEEPERS.get(param, ()) if ref() is not None and ref() is not keeper]
        _KEEPERS[param] = [*there, weakref.ref(keeper)]


def keeper_of(param: torch.Tensor) -> Keeper | None:
    """The keeper of a parameter's master; None if there is none, or it is gone."""
    return next((keeper for ref in (_KEEPERS and _KEEPERS.get(param)) or () if (keeper := ref()) is not None), None)


def is_saved_elsewhere(param: torch.Tensor) -> bool:
    """Whether the master of a parameter is in another state dict than that of its optimizer."""
    keeper = keeper_of(param)
    return keeper is not None and id(param) in keeper.saved_elsewhere


def master_of(param: torch.Tensor) -> torch.Tensor | None:
    """The fp32 value of a parameter's master; None if it has none."""
    keeper = keeper_of(param)
    return None if keeper is None else keeper.master(param)


def write_master(param: torch.Tensor, value: torch.Tensor) -> torch.Tensor | None:
    """Set the master of a parameter. Returns what to write to the parameter itself; None if it has no master."""
    keeper = keeper_of(param)
    return None if keeper is None or keeper.master(param) is None else keeper.write_master(param, value)
