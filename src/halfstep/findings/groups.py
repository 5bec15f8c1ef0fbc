"""The parameter groups of optimizers, and which of their 16-bit weights have no masters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from ..core.dtypes import HALF_DTYPES
from ..gradients.master_registry import keeper_of
from ..stepping.attached import attached_to

__all__ = ["Group", "dtypes_of", "masters_kept"]


_requires_grad, _dtype = attrgetter("requires_grad"), attrgetter("dtype")


def dtypes_of(tensors: Iterable[torch.Tensor]) -> set[torch.dtype]:
    """The dtypes of some tensors."""
    return set(map(_dtype, tensors))


def masters_kept(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the updates of 16-bit weights are kept somewhere, or rounded so that none is lost on average."""
    attached = attached_to(optimizer)
    options = getattr(optimizer, "options", None)  # of a fused optimizer
    fused = bool(getattr(options, "master_weights", None)) or getattr(options, "rounding", "nearest") == "stochastic"
    return fused or (attached is not None and attached.keeper.any)


@dataclass(frozen=True)
class Group:
    """A parameter group.

    Attributes:
        optimizer: whose it is.
        hyper: its hyperparameters.
        params: those of its parameters that are trained.
        dtypes: of these.
        halves: those of them that are in 16 bits and have no master.
    """

    optimizer: torch.optim.Optimizer
    hyper: Mapping[str, Any]
    params: list[torch.Tensor]
    dtypes: set[torch.dtype]
    halves: list[torch.Tensor]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Group:
        """The facts about a group."""
        params = list(filter(_requires_grad, group["params"]))
        dtypes = dtypes_of(params)
        if dtypes.isdisjoint(HALF_DTYPES) or masters_kept(optimizer):
            return cls(optimizer, group, params, dtypes, [])
        bare = [p for p in params if p.dtype in HALF_DTYPES and keeper_of(p) is None]
        return cls(optimizer, group, params, dtypes, bare)
