"""The agreement of the ranks of one optimizer: all of them step with the same gradients, or none of them steps.

``ddp_hook`` averages gradients during backward passes. This module does the rest: it finds the
DistributedDataParallel wrappers of the optimizer's parameters, gives every rank the same masters, averages before a
step the gradients that no backward pass has averaged, and shares overflows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..core.errors import UsageError
from ..gradients.async_reader import AsyncReader, capturing
from ..gradients.loss_scaler import DeviceLossScaler
from . import ddp_hook
from .agreement import StepFacts, refuse_too_late
from .ddp_hook import Reduction, changes_gradients, known_wrappers, reduction_of
from .flat_buckets import average_gradients, share_masters

__all__ = ["BackwardRecord", "RankSync", "share_overflow"]


@dataclass(eq=False)
class BackwardRecord:
    """The overflow check of one scaled backward pass since the last step.

    Attributes:
        found_inf: 0-dim float32 tensor, 1.0 if it overflowed on this rank; after ``share_overflow``, on any rank.
        scaler: the loss scale to update with it; None if there is none or it was updated already.
        shared: whether ``found_inf`` is the same on all ranks by now.
        dynamic: whether an overflow lowers the loss scale.
    """

    found_inf: torch.Tensor
    scaler: DeviceLossScaler | None
    shared: bool = False
    dynamic: bool = False


class RankSync:
    """The DistributedDataParallel wrappers around the parameters of one optimizer.

    Attributes:
        inside: whether the optimizer is inside of another attached one, which does all of this.
        reductions: those of the wrappers that have been found. Without any there is nothing to do but to look for them.
    """

    def __init__(self) -> None:
        self.inside = False
        self.reductions: list[Reduction] = []
        self._unsynced: set[Reduction] = set()
        self._key: tuple[int, ...] = (0,)
        self._watched: dict[Reduction, tuple[int, dict[torch.Tensor, int]]] = {}
        self._averaged_next = False
        self._has_passed = False
        self._ever_passed = False
        self._alone_in_window = False
        self._ever_agreed = False
        self._late_facts = AsyncReader(2)
        self._sparse: dict[int, int] = {}
        self._scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)

    @property
    def joining(self) -> bool:
        """Whether some ranks may have run out of inputs, so that they take part in nothing but reductions."""
        return any(reduction.is_joining for reduction in self.reductions)

    @property
    def has_unsynced(self) -> bool:
        """Whether there are gradients that were not averaged over the ranks."""
        return bool(self._unsynced)

    def clear(self) -> None:
        """The gradients were cleared."""
        self._unsynced.clear()
        self.end_window()

    def end_window(self) -> None:
        """The gradients were used: what comes now is another accumulation window."""
        for reduction in self.reductions:
            reduction.end_window()
        self._has_passed = self._alone_in_window = False

    def gradient_scale(self, scale: torch.Tensor | None) -> torch.Tensor | None:
        """The divisor of the gradients of a pass whose loss is multiplied by ``scale``.

        Within our blocks ranks always send means, because averaging an average changes nothing: so any mix of synced
        and unsynced passes is right. If the wrapper is to leave something else (``gradient_average=False``), the
        factor between that and the mean is treated as a part of the loss scale.

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
            device = self.reductions[0].device
            one = torch.ones((), dtype=torch.float32, device=device) if scale is None else scale
            self._scales = known, divided = scale, one / factor
        return divided

    @property
    def will_sync(self) -> bool:
        """Whether the ranks will average the next backward pass."""
        return any(reduction.will_sync for reduction in self.reductions)

    def averaged_next(self, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those of some parameters whose gradients the next backward pass averages, so that they must stay in place."""
        syncing = [reduction for reduction in self.reductions if reduction.will_sync]
        found = [p for p in params if any(reduction.holds(p) for reduction in syncing)]
        self._averaged_next = self._averaged_next or bool(found)
        return found

    # ---- before and after a backward pass

    def discover_wrappers(
        self, params: Sequence[torch.Tensor], wide: Sequence[torch.Tensor], mastered: Sequence[torch.Tensor]
    ) -> None:
        """Find the wrappers made since the last call. A collective operation if there are new ones with masters.

        Args:
            params: those of the optimizer.
            wide: those among them whose gradients are to be fp32.
            mastered: those whose masters are to be the same on every rank.
        """
        key = (ddp_hook.wrappers_seen, len(params), len(wide))
        if key == self._key or self.inside or not ddp_hook.wrappers_seen:
            return
        self._key = key
        for wrapper in known_wrappers():
            if not changes_gradients(wrapper):
                continue
            reduction = reduction_of(wrapper)
            if reduction not in self.reductions and any(reduction.holds(p) for p in params):
                self.reductions.append(reduction)
                # The wrapper gave every rank the weights of rank 0, but each rank still has its own masters.
                share_masters([p for p in mastered if reduction.holds(p)], reduction.group)
            reduction.widen(wide)

    def begin_backward(
        self, scale: torch.Tensor | None, params: Sequence[torch.Tensor], held: dict[int, torch.Tensor]
    ) -> None:
        """A backward pass scaled by ``scale`` begins.

        Args:
            scale: by what its gradients are to be divided.
            params: those of the optimizer.
            held: what is set aside of their gradients; what the ranks average in this pass is taken out of it.
        """
        self.reductions = [reduction for reduction in self.reductions if reduction.alive]
        self._has_passed = self._ever_passed = True
        for reduction in self.reductions:
            if not reduction.hooked and reduction.will_sync:
                # Under a user's communication hook our gradients can only travel in ``p.grad``, in its dtype.
                for param in params:
                    if id(param) in held and reduction.holds(param):
                        before = held.pop(id(param))
                        param.grad = (before if scale is None else before * scale).to(param.dtype)
            reduction.watched = True
            reduction.scale = scale
            reduction.held.append(held)
            reduction.fill_missing_gradients()
            self._watched[reduction] = (reduction.allreduces, _versions(reduction, params))

    def end_backward(self, params: Sequence[torch.Tensor]) -> None:
        """The backward pass is over: find out whether the ranks averaged its gradients."""
        for reduction, (count, before) in self._watched.items():
            unsent = reduction.end_backward()
            if reduction.allreduces > count or (not reduction.hooked and reduction.will_sync):
                reduction.rebuild_buckets()
                # A pass that began unsynced can be averaged all the same. Gradients set aside were not sent then.
                if reduction.will_sync or not unsent:
                    self._unsynced.discard(reduction)
            elif (after := _versions(reduction, params)) != before:
                self._unsynced.add(reduction)
                reduction.remember_unsynced([param for param, version in after.items() if before.get(param) != version])
        self._watched.clear()
        self._averaged_next = False

    def abandon_backward(self, params: Sequence[torch.Tensor]) -> bool:
        """The backward pass failed; whether gradients accumulated before it are lost, for they were in a bucket."""
        lost = self._averaged_next or any(
            reduction.allreduces > count for reduction, (count, _) in self._watched.items()
        )
        for reduction, (count, before) in self._watched.items():
            reduction.end_backward()
            if reduction.allreduces == count:
                after = _versions(reduction, params)
                reduction.remember_unsynced([param for param, version in after.items() if before.get(param) != version])
        self._watched.clear()
        self._averaged_next = False
        return lost

    # ---- before a step

    @torch.no_grad()
    def agree(
        self,
        params: Sequence[torch.Tensor],
        records: list[BackwardRecord],
        scalers: Sequence[DeviceLossScaler | None],
        *,
        steps: bool = True,
    ) -> None:
        """Find out whether any rank has gradients that were not averaged: all ranks must do then what one of them does.

        A rank may have had no backward pass in this window, or none after one that was averaged. It takes part with
        gradients of zero, and moves its loss scales as the others do. This is a collective operation. A rank takes part
        even if it has nothing to share, because it cannot know what the others have.

        Nothing is read from a device until the last pass of some window was not averaged. If the process group has no
        backend for the CPU, and only some ranks have such a window, the first one comes too late: the others have
        stepped. Then the next call raises on every rank.

        Args:
            params: those of the optimizer.
            records: those of this window; extended on a rank that has none where others have some.
            scalers: the loss scales that those are of, if there are no records in this window at all.
            steps: whether a step follows. If not, ranks in a window averaged by its last pass need not take part.

        Raises:
            UsageError: on every rank, if they had passes with different numbers of loss scales, if only some clip
                gradients that were not averaged, or if it was too late in the call before.
        """
        if self.joining:
            if self._unsynced:
                raise UsageError(
                    "Inside of DistributedDataParallel.join() the last backward pass before a step must not be in "
                    "no_sync(): ranks that have run out of inputs take part in the reductions of backward passes only."
                )
            return
        silent = not (self._has_passed or records) and (self._ever_passed or all(p.grad is None for p in params))
        knows = bool(silent or self._unsynced or self._ever_agreed)
        may_differ = steps and self._ever_passed and not capturing(self.reductions[0].device)
        if self._alone_in_window or not (knows or may_differ):
            return
        if any(late and left for late, left in self._late_facts.poll(wait=True)):
            refuse_too_late()
        self._sparse.clear()
        news = len({record.scaler for record in records if not record.shared})
        missing = list(dict.fromkeys(record.scaler for record in records)) or scalers
        # Gradients that were averaged are the same everywhere: only a rank with others has to look.
        sparse = bool(self._unsynced) and any(p.grad is not None and p.grad.is_sparse for p in params)
        follows = False
        for group in _groups([self]):
            mine = [reduction for reduction in self.reductions if reduction.alive and reduction.group is group]
            late = not (knows or mine[0].has_cpu)
            device = torch.device("cpu") if mine[0].has_cpu else mine[0].device
            unsynced = [reduction in self._unsynced for reduction in mine]
            shared = StepFacts.of_rank(
                unsynced, late=late, steps=steps, sparse=sparse, news=news, missing=len(missing)
            ).share(group, device)
            if late:
                self._late_facts.post(shared[0], shared[1])
                continue
            facts = StepFacts.read(shared)
            if facts.late and facts.left:
                self._late_facts.post(shared[0], shared[1])
                self._end_alone(records)
                return
            facts.refuse_differences(news)
            follows = follows or (facts.any_news and not news)
            self._unsynced.update(reduction for reduction, one in zip(mine, facts.unsynced, strict=True) if one)
            self._ever_agreed = self._ever_agreed or facts.left
            if facts.sparse:
                self._share_sparse([p for p in params if p.requires_grad], group, device)
        for scaler in missing if follows else ():
            found_inf = torch.zeros((), dtype=torch.float32, device=self.reductions[0].device)
            dynamic = bool(scaler and scaler.dynamic)
            records.append(BackwardRecord(found_inf, scaler, dynamic=dynamic))

    def _end_alone(self, records: Iterable[BackwardRecord]) -> None:
        """Send nothing more in this window: others go on without it, until all ranks raise before the next step."""
        self._alone_in_window = True
        self._unsynced.clear()
        for record in records:
            record.shared = True

    def _share_sparse(self, params: Sequence[torch.Tensor], group: dist.ProcessGroup, device: torch.device) -> None:
        """Find out of which parameters some rank has a sparse gradient, and with how many sparse dimensions."""
        dims = [p.grad.sparse_dim() if p.grad is not None and p.grad.is_sparse else 0 for p in params]
        shared = torch.tensor(dims, dtype=torch.int64, device=device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=group)
        self._sparse.update((id(p), dim) for p, dim in zip(params, shared.tolist(), strict=True) if dim)

    @torch.no_grad()
    def average_unsynced(self, params: Sequence[torch.Tensor], wide: Sequence[torch.Tensor]) -> None:
        """Average the gradients that no backward pass has averaged, in flat buckets. A collective operation.

        Gradients of ``wide`` parameters are fp32 afterwards, on every rank.
        """
        fp32 = set(map(id, wide))
        sparse = {id(p): p.grad.sparse_dim() for p in params if p.grad is not None and p.grad.is_sparse} | self._sparse
        done: set[int] = set()
        for reduction in [reduction for reduction in self.reductions if reduction in self._unsynced]:
            owners = [p for p in params if reduction.holds(p) and id(p) not in done and p.requires_grad]
            done.update(map(id, owners))
            average_gradients(owners, reduction.group, reduction.world, fp32, sparse)
        self._unsynced.clear()


def share_overflow(
    records: Iterable[BackwardRecord], ranks: Iterable[RankSync]
) -> dict[DeviceLossScaler, torch.Tensor]:
    """Share overflows between the ranks: one all-reduce, of one number for each loss scale.

    Args:
        records: those of an accumulation window. ``found_inf`` of records that were not shared yet changes in place.
        ranks: whose process groups take part; without any nothing is sent.

    Returns:
        For each loss scale with new records, whether one of its passes overflowed on any rank. Only the first
        overflow of a window counts.
    """
    new: dict[DeviceLossScaler | None, list[BackwardRecord]] = {}
    before: dict[DeviceLossScaler | None, list[torch.Tensor]] = {}
    for record in records:
        if record.shared:
            before.setdefault(record.scaler, []).append(record.found_inf)
        else:
            new.setdefault(record.scaler, []).append(record)
    shared = {scaler: row[-1].found_inf for scaler, row in new.items() if scaler is not None}
    # While ranks join, what is shared is in the averaged gradients: they are not finite on any rank.
    if new and (groups := _groups(one for one in ranks if not one.joining)):
        device = next(iter(new.values()))[0].found_inf.device
        verdicts = torch.stack([torch.stack([p.found_inf.to(device) for p in row]).amax() for row in new.values()])
        for group in groups:
            dist.all_reduce(verdicts, op=dist.ReduceOp.MAX, group=group)
        for verdict, (scaler, row) in zip(verdicts.unbind(), new.items(), strict=True):
            for record in row:
                record.found_inf.copy_(verdict)
            if scaler in shared and scaler in before:
                # An overflow stays in averaged gradients, so a later pass of the window sees the same one again.
                shared[scaler] = verdict * (torch.stack(before[scaler]).amax() == 0)
    for row in new.values():
        for record in row:
            record.shared = True
    return shared


def _groups(ranks: Iterable[RankSync]) -> list[dist.ProcessGroup]:
    groups: list[dist.ProcessGroup] = []
    for one in ranks:
        for reduction in one.reductions:
            if reduction.alive and not any(reduction.group is group for group in groups):
                groups.append(reduction.group)
    return groups


def _versions(reduction: Reduction, params: Sequence[torch.Tensor]) -> dict[torch.Tensor, int]:
    """The version of each gradient of a wrapper, which changes when a backward pass adds to it."""
    return {p: p.grad._version for p in params if p.grad is not None and reduction.holds(p)}
