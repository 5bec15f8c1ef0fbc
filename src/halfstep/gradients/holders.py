"""Who holds the fp32 master of a parameter: asked by whatever saves, loads or averages the weights of a model.

A parameter does not know its optimizer, and what hangs on a module would be copied with it. So this map is weak on both
sides: a model that outlives its optimizer has no masters any more.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, MutableMapping
from typing import Protocol

import torch
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["Holder", "hold", "holder_of", "master_of", "write_master"]


class Holder(Protocol):
    """Whoever keeps masters."""

    def master(self, param: torch.Tensor) -> torch.Tensor | None:
        """The fp32 value of a parameter's master, which may be its very memory; None if it has none."""

    def write_master(self, param: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Set the master of a parameter that has one; what to write to the parameter itself, in its dtype."""


_HOLDERS: MutableMapping[torch.Tensor, list[weakref.ref[Holder]]] = WeakIdKeyDictionary()


def hold(params: Iterable[torch.Tensor], holder: Holder) -> None:
    """From now on this holder is asked for the masters of these parameters, if no earlier one is there (any more)."""
    for param in params:
        there = [ref for ref in _HOLDERS.get(param, ()) if ref() is not None and ref() is not holder]
        _HOLDERS[param] = [*there, weakref.ref(holder)]


def holder_of(param: torch.Tensor) -> Holder | None:
    """Who holds the master of a parameter; None if nobody does, or not any more."""
    return next((holder for ref in _HOLDERS.get(param, ()) if (holder := ref()) is not None), None)


def master_of(param: torch.Tensor) -> torch.Tensor | None:
    """The fp32 value of a parameter's master; None if it has none."""
    holder = holder_of(param)
    return None if holder is None else holder.master(param)


def write_master(param: torch.Tensor, value: torch.Tensor) -> torch.Tensor | None:
    """Set the master of a parameter; what to write to the parameter itself, None if it has no master."""
    holder = holder_of(param)
    return None if holder is None or holder.master(param) is None else holder.write_master(param, value)
