"""What an attached optimizer knows about other processes: every rank steps with the same gradients, or no rank does.

``engine.reduction`` averages gradients during backward passes. Here is what is left: to find the wrappers that the
optimizer's parameters belong to, to give every rank the same masters, to average in ``step`` what the last micro-step
left unaveraged, and to agree on overflows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..core.dtypes import is_half
from ..core.errors import UsageError
from ..gradients.holders import master_of, write_master
from ..gradients.ledger import get_grads, set_grads
from ..gradients.loss_scaler import LossScaler
from .ddp_hook import Reduction, has_work, known_wrappers, reduction_of, wrappers_seen

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
    """The wrappers around the parameters of one optimizer.

    Attributes:
        inside: whether it is inside of another attached optimizer, which looks after other ranks.
        reductions: those of the wrappers that have been found.
    """

    def __init__(self) -> None:
        self.inside = False
        self.reductions: list[Reduction] = []
        self._behind: set[Reduction] = set()
        self._key: tuple[int, ...] = (0,)
        self._watched: dict[Reduction, tuple[int, dict[torch.Tensor, int]]] = {}
        self._carried = False
        self._scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)

    @property
    def alone(self) -> bool:
        """Whether there is nobody to look for: this process has never had a wrapper."""
        return self.inside or wrappers_seen() == 0

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

    @property
    def syncing(self) -> bool:
        """Whether ranks will average the pass that comes."""
        return any(reduction.syncs for reduction in self.reductions)

    def carried(self, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those of some parameters whose gradients are to stay in place, for the pass that comes averages them."""
        syncing = [reduction for reduction in self.reductions if reduction.syncs]
        found = [p for p in params if any(reduction.holds(p) for reduction in syncing)]
        self._carried = self._carried or bool(found)
        return found

    # ---- before and after a backward pass

    def look(
        self, params: Sequence[torch.Tensor], wide: Sequence[torch.Tensor], mastered: Sequence[torch.Tensor]
    ) -> None:
        """Find the wrappers made since the last call. A collective operation where there are new ones with masters.

        Args:
            params: those of the optimizer.
            wide: those among them whose gradients are to be fp32.
            mastered: those whose masters are to be the same on every rank.
        """
        key = (wrappers_seen(), len(params), len(wide))
        if key == self._key or self.alone:
            return
        self._key = key
        for wrapper in known_wrappers():
            if not has_work(wrapper):
                continue
            reduction = reduction_of(wrapper)
            if reduction not in self.reductions and any(reduction.holds(p) for p in params):
                self.reductions.append(reduction)
                # The wrapper gave every rank the weights of rank 0; their masters may still be of this rank's own.
                _share_masters([p for p in mastered if reduction.holds(p)], reduction.group)
            reduction.widen(wide)

    def watch(self, scale: torch.Tensor | None, params: Sequence[torch.Tensor], held: dict[int, torch.Tensor]) -> None:
        """A backward pass scaled by ``scale`` begins.

        Args:
            scale: by what its gradients are to be divided.
            params: those of the optimizer.
            held: what is set aside of their gradients; what the ranks average in this pass is taken out of it.
        """
        self.reductions = [reduction for reduction in self.reductions if reduction.alive]
        for reduction in self.reductions:
            if not reduction.hooked and reduction.syncs:
                # Under somebody else's communication hook it travels in the gradients themselves, in their dtype.
                for param in params:
                    if id(param) in held and reduction.holds(param):
                        before = held.pop(id(param))
                        param.grad = (before if scale is None else before * scale).to(param.dtype)
            reduction.watched = True
            reduction.scale = scale
            reduction.held.append(held)
            reduction.fill_in()
            self._watched[reduction] = (reduction.talks, _versions(reduction, params))

    def close(self, params: Sequence[torch.Tensor]) -> None:
        """The backward pass is over: find out whether the ranks averaged what it brought."""
        for reduction, (talks, before) in self._watched.items():
            unsent = reduction.release()
            if reduction.talks > talks or (not reduction.hooked and reduction.syncs):
                # Ranks may have averaged a pass that did not look like it when it began.
                if reduction.syncs or not unsent:
                    self._behind.discard(reduction)
            elif (after := _versions(reduction, params)) != before:
                self._behind.add(reduction)
                reduction.kept([param for param, version in after.items() if before.get(param) != version])
        self._watched.clear()
        self._carried = False

    def abandon(self, params: Sequence[torch.Tensor]) -> bool:
        """The backward pass failed; whether what was accumulated before it went with it, in a bucket or on the way."""
        lost = self._carried or any(reduction.talks > talks for reduction, (talks, _) in self._watched.items())
        for reduction, (talks, before) in self._watched.items():
            reduction.release()
            if reduction.talks == talks:
                after = _versions(reduction, params)
                reduction.kept([param for param, version in after.items() if before.get(param) != version])
        self._watched.clear()
        self._carried = False
        return lost

    # ---- before a step

    @torch.no_grad()
    def catch_up(self, params: Sequence[torch.Tensor], wide: Sequence[torch.Tensor]) -> None:
        """Average the gradients that no backward pass averaged, in flat buckets. A collective operation.

        Those of ``wide`` parameters are fp32 afterwards, whether or not a rank had 16-bit ones before.
        """
        fp32 = set(map(id, wide))
        done: set[int] = set()
        for reduction in [reduction for reduction in self.reductions if reduction in self._behind]:
            owners = [p for p in params if reduction.holds(p) and id(p) not in done and p.requires_grad]
            done.update(map(id, owners))
            for bucket in _flat_buckets(owners):
                _average(bucket, reduction, fp32)
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


def _versions(reduction: Reduction, params: Sequence[torch.Tensor]) -> dict[torch.Tensor, int]:
    """Of each gradient of a wrapper, a number that changes when a backward pass adds to it."""
    return {p: p.grad._version for p in params if p.grad is not None and reduction.holds(p)}


@torch.no_grad()
def _share_masters(params: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Give every rank the masters of the group's first rank."""
    source = dist.get_global_rank(group, 0)
    owners = [p for p in params if master_of(p) is not None]
    for bucket in _chunks(owners):
        flat = torch.cat([master_of(p).flatten() for p in bucket])  # type: ignore[union-attr]
        dist.broadcast(flat, source, group=group)
        for param, values in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            rounded = write_master(param, values.view_as(param))
            assert rounded is not None
            if not torch.equal(rounded, param):  # a forward pass may have saved the parameter as it is
                param.copy_(rounded)


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


def _average(owners: list[torch.Tensor], reduction: Reduction, fp32: set[int]) -> None:
    """Replace each gradient by its mean over the ranks; none counts as zero, unless no rank has one."""
    grads = get_grads(owners)
    first = grads[0]
    if first is not None and first.is_sparse:
        total = (first.float() if is_half(first) else first).coalesce()
        dist.all_reduce(total, group=reduction.group)
        set_grads(owners[:1], [(total / reduction.world).to(first.dtype)])
        return
    dtype = torch.float32 if is_half(owners[0]) else owners[0].dtype
    parts = [
        torch.zeros_like(p, dtype=dtype).flatten() if g is None else g.flatten().to(dtype)
        for p, g in zip(owners, grads, strict=True)
    ]
    present = torch.tensor([float(g is not None) for g in grads], device=owners[0].device).to(dtype)
    flat = torch.cat([*parts, present])
    dist.all_reduce(flat, group=reduction.group)
    *sums, present = flat.split([*(p.numel() for p in owners), len(owners)])
    for param, values, anyone in zip(owners, sums, present.real.tolist(), strict=True):
        if anyone:
            mean = (values / reduction.world).view_as(param)
            if id(param) not in fp32:
                mean = mean.to(param.dtype)
            if param.grad is None or param.grad.dtype is not mean.dtype:
                set_grads([param], [mean])
            else:
                param.grad.copy_(mean)
