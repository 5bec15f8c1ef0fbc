"""The predicted share of lost updates of 16-bit weights without masters, from state and learning rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...core.scalars import in_scalar_dtype
from ..observe.reading import Reading
from ..observe.samples import Drawn, can_sample, column, draw, element_shares, samples_in
from .groups import Group
from .updates import decays_apart, known_update, rounds_once

__all__ = ["LostUpdates", "half_ulp"]


def half_ulp(weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute half the distance from fp32 values, all exact in a 16-bit dtype, to its next larger numbers."""
    power = (weights.view(torch.int32) & 0x7F800000).view(torch.float32)  # the largest power of two below
    info = torch.finfo(dtype)
    return power.clamp_(min=info.tiny).mul_(info.eps / 2)


@dataclass(frozen=True)
class LostUpdates:
    """The updates of one optimizer's 16-bit weights of one dtype.

    Attributes:
        optimizer: the optimizer of the weights.
        dtype: the dtype of the weights.
        params: the weights.
        lrs: the learning rates of their groups; a tensor on a device is read together with the other numbers.
    """

    optimizer: torch.optim.Optimizer
    dtype: torch.dtype
    params: list[torch.Tensor]
    lrs: list[float | int]
    _numbers: int
    _reading: Reading

    @classmethod
    def of(cls, groups: Sequence[Group], reading: Reading) -> list[LostUpdates]:
        """Queue the required reads; returns one entry per optimizer and dtype with known updates."""
        group_of = {id(p): group for group in groups for p in group.halves if can_sample(p) and _steps(p, group)}
        every = [p for group in groups for p in group.halves if id(p) in group_of]
        batches: dict[tuple[Any, ...], list[Drawn]] = {}
        for drawn in draw(every):
            param = drawn.tensor
            group = group_of[id(param)]
            known = bool(group.optimizer.state.get(param)), param.grad is None
            batches.setdefault((id(group), param.dtype, param.device, *known), []).append(drawn)
        parts: dict[tuple[torch.optim.Optimizer, torch.dtype], list[_Part]] = {}
        for batch in batches.values():
            group = group_of[id(batch[0].tensor)]
            part = _part_of(group, batch)
            if part is not None:
                parts.setdefault((group.optimizer, batch[0].tensor.dtype), []).append(part)
        found = []
        for (optimizer, dtype), some in parts.items():
            device = some[0].sums.device
            sums = torch.stack([part.sums.to(device) for part in some]).sum(0)
            median = torch.cat([part.ratio.to(device) for part in some]).median()
            params = [p for p in every if group_of[id(p)].optimizer is optimizer and p.dtype is dtype]
            lrs = [reading.ask(part.lr) if isinstance(part.lr, torch.Tensor) else float(part.lr) for part in some]
            found.append(cls(optimizer, dtype, params, lrs, reading.ask(torch.cat([sums, median[None]])), reading))
        return found

    @property
    def fraction(self) -> float:
        """The share of nonzero updates that change nothing; 0 if all updates are zero."""
        lost, moving, _ = self._reading[self._numbers]
        return lost / moving if moving else 0.0

    @property
    def lr(self) -> float:
        """The largest learning rate."""
        return max(self._reading[lr][0] if isinstance(lr, int) else lr for lr in self.lrs)

    @property
    def lr_for_half(self) -> float:
        """The learning rate that would change half of the weights."""
        return self.lr * self._reading[self._numbers][2]


class _Part(NamedTuple):
    """The updates of some weights of a group.

    Attributes:
        sums: the lost share and the moving share, as shares of all weights.
        ratio: the factor for the learning rate at which each weight would move.
        lr: the learning rate.
    """

    sums: torch.Tensor
    ratio: torch.Tensor
    lr: float | torch.Tensor


def _steps(param: torch.Tensor, group: Group) -> bool:
    """True if a parameter steps; without state or gradient, while other parameters have state, it does not."""
    state = group.optimizer.state
    return not state or param.grad is not None or bool(state.get(param))


def _steps_taken(state: Mapping[str, Any]) -> float | torch.Tensor:
    """Return the step count of a parameter's state; a tensor if it lies on a device."""
    step = state.get("step", 1.0 if state else 0.0)
    return step if isinstance(step, torch.Tensor) and step.device.type != "cpu" else float(step)


@torch.no_grad()
def _part_of(group: Group, batch: Sequence[Drawn]) -> _Part | None:
    """Predict the updates of a sample; None if the optimizer's update is unknown or its state is not enough."""
    known = known_update(group.optimizer)
    if known is None:
        return None
    params, shares, counts = zip(*batch, strict=True)
    state: list[Any] = [group.optimizer.state.get(p) or {} for p in params]
    narrow = column(params, counts)
    columns = {"param": in_scalar_dtype(narrow)}
    for name in known.state_names:
        if all(isinstance(entry.get(name), torch.Tensor) for entry in state):
            columns[name] = in_scalar_dtype(column((entry[name] for entry in state), counts))
    if all(p.grad is not None for p in params):
        columns["grad"] = in_scalar_dtype(column((p.grad for p in params), counts))
    taken = _steps_taken(state[0])
    stepped = isinstance(taken, torch.Tensor) or taken > 0
    t = in_scalar_dtype(torch.as_tensor(taken if stepped else 1.0, device=getattr(taken, "device", "cpu")))
    hyper = dict(group.hyper)
    if decays_apart(hyper) and not rounds_once(group.optimizer, hyper):
        hyper["weight_decay"] = 0.0  # torch applies and rounds the decay separately before
    updated = known.weights(hyper, columns, t, stepped=stepped)
    if updated is None:
        return None
    moves = updated != columns["param"]
    lost = (updated.to(narrow.dtype) == narrow) & moves
    share = element_shares(shares, list(map(samples_in, params, counts)), narrow.device)
    sums = torch.stack([share @ lost.float(), share @ moves.float()])
    ratio = half_ulp(narrow.float(), narrow.dtype) / (updated - columns["param"]).abs()
    return _Part(sums, ratio.float(), group.hyper["lr"])
