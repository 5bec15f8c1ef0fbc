"""The parameter groups of optimizers: their 16-bit weights without masters, and their second moments in 16 bits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from ...core.dtypes import HALF_DTYPES
from ...parameters.master_registry import keeper_of
from ...stepping.attached import attached_to
from .updates import known_update

__all__ = ["Group", "SecondMoment", "dtypes_of", "masters_kept", "second_moments"]

_requires_grad, _dtype = attrgetter("requires_grad"), attrgetter("dtype")
_NAMES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg")


def dtypes_of(tensors: Iterable[torch.Tensor]) -> set[torch.dtype]:
    """Collect the dtypes of tensors."""
    return set(map(_dtype, tensors))


def masters_kept(optimizer: torch.optim.Optimizer) -> bool:
    """True if an optimizer keeps masters of 16-bit weights, or rounds so that no update is lost on average."""
    attached = attached_to(optimizer)
    options = getattr(optimizer, "options", None)  # set on fused optimizers
    fused = bool(getattr(options, "master_weights", None)) or getattr(options, "rounding", "nearest") == "stochastic"
    return fused or (attached is not None and attached.window.table.has_masters)


@dataclass(frozen=True)
class Group:
    """A parameter group.

    Attributes:
        optimizer: the optimizer of the group.
        hyper: the hyperparameters.
        params: the trained parameters of the group.
        dtypes: the dtypes of the trained parameters.
        halves: the trained 16-bit parameters without a master.
    """

    optimizer: torch.optim.Optimizer
    hyper: Mapping[str, Any]
    params: list[torch.Tensor]
    dtypes: set[torch.dtype]
    halves: list[torch.Tensor]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Group:
        """Collect the facts about a group."""
        params = list(filter(_requires_grad, group["params"]))
        dtypes = dtypes_of(params)
        if dtypes.isdisjoint(HALF_DTYPES) or masters_kept(optimizer):
            return cls(optimizer, group, params, dtypes, [])
        bare = [p for p in params if p.dtype in HALF_DTYPES and keeper_of(p) is None]
        return cls(optimizer, group, params, dtypes, bare)


@dataclass(frozen=True)
class SecondMoment:
    """A second moment in 16 bits.

    Attributes:
        group: the parameter group.
        params: the parameters of these moments.
        dtype: the dtype of the moments.
        keeps: the factor by which a step multiplies the moments.
    """

    group: Group
    params: list[torch.Tensor]
    dtype: torch.dtype
    keeps: float


def second_moments(groups: Sequence[Group]) -> Iterator[SecondMoment]:
    """Yield all second moments in 16 bits; a group whose weights all have masters is judged by its first parameter."""
    for group in groups:
        state = group.optimizer.state
        made = _is_made(group)
        keeps = group.hyper["betas"][1] if "betas" in group.hyper else group.hyper.get("alpha")
        if not isinstance(keeps, float):
            continue
        there: dict[torch.dtype, list[torch.Tensor]] = {}
        name = ""
        for param in group.halves or group.params[:1]:
            entry = state.get(param)
            if entry and name not in entry:
                name = next((name for name in _NAMES if name in entry), "")
            moment = entry.get(name) if entry else param if made else None
            dtype = getattr(moment, "dtype", None)
            if dtype in HALF_DTYPES:
                there.setdefault(dtype, []).append(param)
        yield from (SecondMoment(group, params, dtype, keeps) for dtype, params in there.items())


def _is_made(group: Group) -> bool:
    """True if the optimizer's first step creates a second moment in the dtype of its 16-bit weights."""
    known = known_update(group.optimizer)
    made = known is not None and not set(_NAMES).isdisjoint(known.state_names)
    return made and bool(group.halves) and not hasattr(group.optimizer, "keep_masters")
