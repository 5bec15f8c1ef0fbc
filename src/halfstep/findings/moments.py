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
        state = group.optimizer.state
        made = _is_made(group)
        keeps = group.hyper["betas"][1] if "betas" in group.hyper else group.hyper.get("alpha")
        if not isinstance(keeps, float):
            continue
        there: dict[torch.dtype, list[torch.Tensor]] = {}
        for param in group.halves or group.params[:1]:
            entry = state.get(param)
            if entry:
                name = next((name for name in _NAMES if name in entry), "")
                dtype = getattr(entry.get(name), "dtype", None)
            else:
                dtype = param.dtype if made else None
            if dtype in HALF_DTYPES:
                there.setdefault(dtype, []).append(param)
        yield from (SecondMoment(group, params, dtype, keeps) for dtype, params in there.items())


def _is_made(group: Group) -> bool:
    """Whether the first step of the optimizer makes a second moment in the dtype of its 16-bit weights."""
    made = not set(_NAMES).isdisjoint(state_names(group.optimizer) or ())
    return made and bool(group.halves) and not hasattr(group.optimizer, "keep_masters")
