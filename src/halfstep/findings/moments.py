"""The second moments that optimizers keep in 16 bits, or will keep after their first step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..core.dtypes import HALF_DTYPES
from .groups import Group
from .updates import state_names

__all__ = ["SecondMoment", "second_moments"]

_NAMES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg")


@dataclass(frozen=True)
class SecondMoment:
    """A second moment in 16 bits.

    Attributes:
        group: the parameter group.
        params: whose moments they are.
        dtype: of the moments.
        keeps: what a step multiplies them by.
    """

    group: Group
    params: list[torch.Tensor]
    dtype: torch.dtype
    keeps: float


def second_moments(groups: Sequence[Group]) -> Iterator[SecondMoment]:
    """All of them. Where a group has no 16-bit weights without masters, its first parameter speaks for the rest."""
    for group in groups:
        keeps = group.hyper["betas"][1] if "betas" in group.hyper else group.hyper.get("alpha")
        if not isinstance(keeps, float):
            continue
        there: dict[torch.dtype, list[torch.Tensor]] = {}
        for param in group.halves or group.params[:1]:
            dtype = _dtype_of(group, param)
            if dtype in HALF_DTYPES:
                there.setdefault(dtype, []).append(param)
        yield from (SecondMoment(group, params, dtype, keeps) for dtype, params in there.items())


def _dtype_of(group: Group, param: torch.Tensor) -> torch.dtype | None:
    state = group.optimizer.state.get(param)
    if state:
        return next((state[name].dtype for name in _NAMES if isinstance(state.get(name), torch.Tensor)), None)
    makes = not hasattr(group.optimizer, "keep_masters") and not set(_NAMES).isdisjoint(state_names(group.optimizer) or ())
    return param.dtype if makes and group.halves else None
