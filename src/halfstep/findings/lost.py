"""How much of the updates of 16-bit weights without masters is lost, predicted from state and learning rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..core.scalars import in_scalar_dtype
from ..observe.samples import Drawn, Reading, can_sample, column, draw, element_shares, samples_in
from .groups import Group
from .updates import state_names, updated_weights

__all__ = ["LostUpdates", "half_ulp"]


def half_ulp(weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Half the distance from fp32 values, all of them numbers of a 16-bit dtype, to the next such number above."""
    power = (weights.view(torch.int32) & 0x7F800000).view(torch.float32)  # the largest power of two below
    info = torch.finfo(dtype)
    return power.clamp_(min=info.tiny).mul_(info.eps / 2)


@dataclass
class LostUpdates:
    """The updates of one optimizer's 16-bit weights of one dtype.

    Attributes:
        optimizer: whose they are.
        dtype: of the weights.
        params: the weights.
        lrs: the learning rates of their groups; a tensor's is read from the device with the rest.
    """

    optimizer: torch.optim.Optimizer
    dtype: torch.dtype
    params: list[torch.Tensor]
    lrs: list[float | slice]
    _reading: Reading
    _sums: list[slice] = field(default_factory=list)
    _median: slice | None = None

    @classmethod
    def of(cls, groups: Sequence[Group], reading: Reading) -> list[LostUpdates]:
        """Ask for what is needed; one entry for each optimizer and dtype of which there is something to say."""
        found: dict[tuple[int, torch.dtype], LostUpdates] = {}
        needed: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        every = [(p, group) for group in groups for p in group.halves if can_sample(p) and _steps(p, group)]
        if not every:
            return []
        of_param = {id(p): group for p, group in every}
        batches: dict[tuple[Any, ...], list[Drawn]] = {}
        for drawn in draw([p for p, _ in every]):
            param = drawn.tensor
            group = of_param[id(param)]
            known = bool(group.optimizer.state.get(param)), param.grad is None
            batches.setdefault((id(group), param.dtype, param.device, *known), []).append(drawn)
        for batch in batches.values():
            group = of_param[id(batch[0][0])]
            key = (id(group.optimizer), batch[0][0].dtype)
            numbers = _lost_of(group, batch)
            if numbers is None:
                continue
            sums, ratio = numbers
            entry = found.setdefault(key, cls(group.optimizer, key[1], [], [], reading))
            entry._sums.append(reading.ask(sums))
            needed.setdefault(key, []).append(ratio)
            lr = group.hyper["lr"]
            entry.lrs.append(reading.ask(lr) if isinstance(lr, torch.Tensor) else float(lr))
        for key, entry in found.items():
            device = needed[key][0].device
            entry._median = reading.ask(torch.cat([ratio.to(device) for ratio in needed[key]]).median())
            entry.params = [p for p, group in every if (id(group.optimizer), p.dtype) == key]
        return list(found.values())

    @property
    def fraction(self) -> float:
        """The share of the updates that changes nothing, of those that are not zero; 0 if all are."""
        lost, moving = (sum(self._reading[where][i] for where in self._sums) for i in (0, 1))
        return lost / moving if moving else 0.0

    @property
    def lr(self) -> float:
        """The largest learning rate."""
        return max(self._reading[lr][0] if isinstance(lr, slice) else lr for lr in self.lrs)

    @property
    def lr_for_half(self) -> float:
        """The learning rate that would change half of the weights."""
        assert self._median is not None
        return self.lr * self._reading[self._median][0]


def _steps(param: torch.Tensor, group: Group) -> bool:
    """Whether a parameter steps: one without state, among others that have some, and without gradient does not."""
    state = group.optimizer.state
    return not state or param.grad is not None or bool(state.get(param))


def _steps_taken(state: Mapping[str, Any]) -> float | torch.Tensor:
    """How many steps a parameter with this state has taken; a tensor where a device has the number."""
    step = state.get("step", 1.0 if state else 0.0)
    on_device = isinstance(step, torch.Tensor) and step.device.type != "cpu"
    return step if on_device else float(step)


@torch.no_grad()
def _lost_of(group: Group, batch: Sequence[Drawn]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Of some parameters of a group: how much is lost and how much moves, in shares of all, and by how much it fails.

    Returns:
        A tensor with both shares, and for each element what the learning rate is to be multiplied by. None if
        the update of this optimizer is not known, or its state does not tell it.
    """
    names = state_names(group.optimizer)
    if names is None:
        return None
    params, shares, counts = zip(*batch, strict=True)
    state: list[Any] = [group.optimizer.state.get(p) or {} for p in params]
    narrow = column(params, counts)
    columns = {"param": in_scalar_dtype(narrow)}
    for name in names:
        if all(isinstance(entry.get(name), torch.Tensor) for entry in state):
            columns[name] = in_scalar_dtype(column((entry[name] for entry in state), counts))
    if all(p.grad is not None for p in params):
        columns["grad"] = in_scalar_dtype(column((p.grad for p in params), counts))
    taken = _steps_taken(state[0])
    stepped = isinstance(taken, torch.Tensor) or taken > 0
    t = in_scalar_dtype(torch.as_tensor(taken if stepped else 1.0))
    updated = updated_weights(group.optimizer, group.hyper, columns, t, stepped=stepped)
    if updated is None:
        return None
    moves = updated != columns["param"]
    lost = (updated.to(narrow.dtype) == narrow) & moves
    share = element_shares(shares, list(map(samples_in, params, counts)), narrow.device)
    sums = torch.stack([share @ lost.float(), share @ moves.float()])
    ratio = half_ulp(narrow.float(), narrow.dtype) / (updated - columns["param"]).abs()
    return sums, ratio.float()
