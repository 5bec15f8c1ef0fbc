"""What one Binding knows about other processes: every rank steps with the same gradients, or no rank does.

``engine.reduction`` averages gradients during backward passes. Here is what is left: to find the wrappers that a
binding's parameters belong to, to give every rank the same masters, to average in ``step`` what the last micro-step
left unaveraged, and to agree on overflows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..core.errors import UsageError
from ..core.formats import is_half
from .masters.plain import MasterLink
from .masters.wide import set_grad
from .reduction import Reduction, has_work, known_wrappers, reduction_of, wrappers_seen
from .scaling import LossScaler

__all__ = ["Pass", "Ranks", "agree", "any_overflow"]

_BUCKET = 2**24  # elements in a flat bucket: 64 MiB of fp32


@dataclass(eq=False)
class Pass:
    """One scaled backward pass since the last step.

    Attributes:
        found_inf: 0-dim float32 tensor, 1.0 if it overflowed; after ``agree``, if it did on any rank.
        scaler: the loss scale that has yet to hear of it, or None.
        agreed: whether all ranks know.
        dynamic: whether its loss scale would go down.
    """

    found_inf: torch.Tensor
    scaler: LossScaler | None
    agreed: bool = False
    dynamic: bool = False


class Ranks:
    """The wrappers around the parameters of one binding."""

    def __init__(self) -> None:
        self.reductions: list[Reduction] = []
        self._behind: set[Reduction] = set()
        self._key: tuple[int, ...] = (0,)
        self._watched: dict[Reduction, tuple[int, dict[torch.Tensor, int]]] = {}
        self._carried = False
        self._scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)

    @property
    def alone(self) -> bool:
        """Whether this process has never had a wrapper: then there is nobody to look for."""
        return wrappers_seen() == 0

    @property
    def behind(self) -> bool:
        """Whether gradients have come that other ranks do not have."""
        return bool(self._behind)

    def forget(self) -> None:
        """The gradients are gone."""
        self._behind.clear()

    def gradient_scale(self, scale: torch.Tensor | None) -> torch.Tensor | None:
        """What the gradients of a pass are to be divided by, where its loss is multiplied by ``scale``.

        Ranks exchange means, whatever the wrapper is to leave: a mean of what is a mean already is the same again, so
        any mix of synced and unsynced passes comes out right. What is not to be a mean differs by a factor, which is
        treated as a part of the loss scale: gradients have it outside of a pass and lose it for the next one.

        Raises:
            UsageError: if wrappers of one optimizer's parameters disagree on it.
        """
        factors = {reduction.factor for reduction in self.reductions}
        if factors <= {1.0}:
            return scale
        if len(factors) > 1:
            raise UsageError(
                "The parameters of one optimizer are in DistributedDataParallel wrappers with different "
                "gradient_average or gradient_predivide_factor; give them the same, or an optimizer each."
            )
        known, divided = self._scales
        if divided is None or known is not scale:
            (factor,) = factors
            one = torch.ones((), device=self.reductions[0].device) if scale is None else scale
            self._scales = known, divided = scale, one / factor
        return divided

    def hold(self, param: torch.Tensor) -> bool:
        """Whether a parameter is in a wrapper."""
        return any(reduction.holds(param) for reduction in self.reductions)

    def carry(self, param: torch.Tensor) -> bool:
        """Whether the gradient of a parameter is to stay in its place, for the pass that begins to average it."""
        carried = any(reduction.holds(param) and reduction.syncs for reduction in self.reductions)
        self._carried = self._carried or carried
        return carried

    # ---- before and after a backward pass

    def look(self, links: Sequence[MasterLink], direct: Sequence[torch.Tensor]) -> None:
        """Find the wrappers made since the last call. A collective operation where there are new ones with masters."""
        key = (wrappers_seen(), len(links), len(direct))
        if key == self._key or self.alone:
            return
        self._key = key
        params = [*(link.model for link in links), *direct]
        for wrapper in known_wrappers():
            if not has_work(wrapper):
                continue
            reduction = reduction_of(wrapper)
            if reduction not in self.reductions and any(reduction.holds(p) for p in params):
                self.reductions.append(reduction)
                # The wrapper gave every rank the weights of rank 0; their masters may still be of this rank's own.
                _broadcast([link.master for link in links if reduction.holds(link.model)], reduction.group)
            if not reduction.hooked and any(reduction.holds(link.model) for link in links):
                reduction.hook()

    def watch(self, scale: torch.Tensor | None, links: Sequence[MasterLink], direct: Sequence[torch.Tensor]) -> None:
        """A backward pass scaled by ``scale`` begins; the gradients that are there stay until ``close``."""
        self.reductions = [reduction for reduction in self.reductions if reduction.alive]
        for reduction in self.reductions:
            reduction.watched = True
            reduction.scale = scale
            reduction.fill_in()
            self._watched[reduction] = (reduction.talks, _versions(reduction, links, direct))

    def preload(self, scale: torch.Tensor | None, links: Sequence[MasterLink]) -> None:
        """Under somebody else's communication hook, what was accumulated travels in the 16-bit gradients."""
        for reduction in self.reductions:
            if reduction.hooked:
                continue
            for link in links:
                accumulated = link.take_accumulated() if reduction.holds(link.model) else None
                if accumulated is not None:
                    scaled = accumulated if scale is None else accumulated * scale
                    link.model.grad = scaled.to(link.model.dtype)

    def close(self, links: Sequence[MasterLink], direct: Sequence[torch.Tensor]) -> None:
        """The backward pass is over: find out whether the ranks averaged what it brought."""
        for reduction, (talks, before) in self._watched.items():
            reduction.release()
            if reduction.talks > talks or (not reduction.hooked and reduction.syncs):
                # Ranks may have averaged a pass that did not look like it when it began, so without what was there.
                if reduction.syncs or not direct:
                    self._behind.discard(reduction)
            elif (after := _versions(reduction, links, direct)) != before:
                self._behind.add(reduction)
                reduction.kept([param for param, version in after.items() if before.get(param) != version])
        self._watched.clear()
        self._carried = False

    def abandon(self, links: Sequence[MasterLink], direct: Sequence[torch.Tensor]) -> bool:
        """The backward pass failed; whether what was accumulated before it went with it, in a bucket or on the way."""
        lost = self._carried or any(reduction.talks > talks for reduction, (talks, _) in self._watched.items())
        for reduction, (talks, before) in self._watched.items():
            reduction.release()
            if reduction.talks == talks:
                after = _versions(reduction, links, direct)
                reduction.kept([param for param, version in after.items() if before.get(param) != version])
        self._watched.clear()
        self._carried = False
        return lost

    # ---- before a step

    @torch.no_grad()
    def catch_up(self, links: Sequence[MasterLink], direct: Sequence[torch.Tensor], *, wide: bool) -> None:
        """Average the gradients that no backward pass averaged, in flat buckets. A collective operation.

        With ``wide`` they are fp32 afterwards, whether or not a rank had 16-bit ones before.
        """
        done: set[int] = set()
        for reduction in [reduction for reduction in self.reductions if reduction in self._behind]:
            owners: list[torch.Tensor] = [link.master for link in links if reduction.holds(link.model)]
            owners += [p for p in direct if reduction.holds(p)]
            owners = [p for p in owners if id(p) not in done and p.requires_grad]
            done.update(map(id, owners))
            for bucket in _flat_buckets(owners):
                _average(bucket, reduction, wide)
        self._behind.clear()


def any_overflow(passes: Sequence[Pass]) -> torch.Tensor:
    """Whether any of them overflowed: a 0-dim float32 tensor."""
    if len(passes) == 1:
        return passes[0].found_inf
    device = passes[0].found_inf.device
    return torch.stack([p.found_inf.to(device) for p in passes]).amax()


def agree(passes: Iterable[Pass], ranks: Iterable[Ranks]) -> dict[LossScaler, torch.Tensor]:
    """Let every rank know whether any of them overflowed: one all-reduce of one number a loss scale.

    Args:
        passes: those of a window; where they are not agreed on yet, their ``found_inf`` is changed in place.
        ranks: whose process groups take part; without any nothing is sent.

    Returns:
        For each loss scale that has yet to hear of it, whether one of its passes overflowed on any rank. It hears of
        one overflow in a window.
    """
    rows: dict[LossScaler | None, list[Pass]] = {}
    before: dict[LossScaler | None, list[torch.Tensor]] = {}
    for passed in passes:
        if passed.agreed:
            before.setdefault(passed.scaler, []).append(passed.found_inf)
        else:
            rows.setdefault(passed.scaler, []).append(passed)
    told = {scaler: row[-1].found_inf for scaler, row in rows.items() if scaler is not None}
    if rows and (groups := _groups(ranks)):
        device = next(iter(rows.values()))[0].found_inf.device
        verdicts = torch.stack([torch.stack([p.found_inf.to(device) for p in row]).amax() for row in rows.values()])
        for group in groups:
            dist.all_reduce(verdicts, op=dist.ReduceOp.MAX, group=group)
        for verdict, (scaler, row) in zip(verdicts.unbind(), rows.items(), strict=True):
            for passed in row:
                passed.found_inf.copy_(verdict)
            if scaler in told and scaler in before:
                # Gradients that ranks average stay together, and so does an overflow among them.
                told[scaler] = verdict * (torch.stack(before[scaler]).amax() == 0)
    for row in rows.values():
        for passed in row:
            passed.agreed = True
    return told


def _groups(ranks: Iterable[Ranks]) -> list[dist.ProcessGroup]:
    groups: list[dist.ProcessGroup] = []
    for one in ranks:
        for reduction in one.reductions:
            if reduction.alive and not any(reduction.group is group for group in groups):
                groups.append(reduction.group)
    return groups


def _versions(
    reduction: Reduction, links: Sequence[MasterLink], direct: Sequence[torch.Tensor]
) -> dict[torch.Tensor, int]:
    """Of each gradient of a wrapper, a number that changes when a backward pass adds to it."""
    params = [*(link.model for link in links), *direct]
    return {p: p.grad._version for p in params if p.grad is not None and reduction.holds(p)}


@torch.no_grad()
def _broadcast(tensors: list[Any], group: dist.ProcessGroup) -> None:
    """The values of the group's first rank, for every rank."""
    source = dist.get_global_rank(group, 0)
    for bucket in _chunks(tensors):
        flat = torch.cat([t.flatten() for t in bucket])
        dist.broadcast(flat, source, group=group)
        for tensor, values in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
            tensor.copy_(values.view_as(tensor))


def _chunks(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Lists of one device and dtype, of at most ``_BUCKET`` elements where there is more than one tensor."""
    chunks: dict[Any, list[list[torch.Tensor]]] = {}
    for tensor in tensors:
        lists = chunks.setdefault((tensor.device, tensor.dtype), [[]])
        if lists[-1] and sum(t.numel() for t in lists[-1]) + tensor.numel() > _BUCKET:
            lists.append([])
        lists[-1].append(tensor)
    return [chunk for lists in chunks.values() for chunk in lists]


def _flat_buckets(owners: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    sparse = [[p] for p in owners if p.grad is not None and p.grad.is_sparse]
    single = {id(p) for (p,) in sparse}
    return [*sparse, *_chunks([p for p in owners if id(p) not in single])]


def _average(owners: list[torch.Tensor], reduction: Reduction, wide: bool) -> None:
    """Replace each gradient by its mean over the ranks; none counts as zero, unless no rank has one."""
    first = owners[0].grad
    if first is not None and first.is_sparse:
        total = (first.float() if is_half(first) else first).coalesce()
        dist.all_reduce(total, group=reduction.group)
        owners[0].grad = (total / reduction.world).to(first.dtype)
        return
    dtype = torch.float32 if is_half(owners[0]) else owners[0].dtype
    parts = [
        torch.zeros_like(p, dtype=dtype).flatten() if p.grad is None else p.grad.flatten().to(dtype) for p in owners
    ]
    present = torch.tensor([float(p.grad is not None) for p in owners], device=owners[0].device).to(dtype)
    flat = torch.cat([*parts, present])
    dist.all_reduce(flat, group=reduction.group)
    *sums, present = flat.split([*(p.numel() for p in owners), len(owners)])
    for param, values, anyone in zip(owners, sums, present.real.tolist(), strict=True):
        if anyone:
            mean = (values / reduction.world).view_as(param)
            if not wide:
                mean = mean.to(param.dtype)
            if param.grad is None or param.grad.dtype is not mean.dtype:
                set_grad(param, mean)
            else:
                param.grad.copy_(mean)
