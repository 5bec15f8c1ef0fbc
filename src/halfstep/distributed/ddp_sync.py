"""The protocol of the ranks: all of them step with the same gradients, or none of them steps.

Every rank runs the same script, on other data. What one optimizer of it sends, in this order:

===============================  =====================================================  ==============================
when                             what every rank sends                                  who sends it
===============================  =====================================================  ==============================
the first block or step with     the masters of the first rank, in flat buckets         ``find_wrappers``
a new wrapper
a backward pass that torch       its buckets, with the gradients that earlier passes    ``Reduction.communicate``
synchronizes                     of this rank have left
the end of such a pass, if       one number for each loss scale: the pass overflowed    ``share_overflow``
the loss is scaled
every step, and                  the facts: about ten numbers (``StepFacts``), of       ``RankSync._agree``
``clip_master_grads`` after a    which all ranks get the largest
pass that was not synchronized
then, if the facts say so        the number of sparse dimensions of each gradient       ``share_sparse_dims``
then, if the facts say so        the gradients that no pass has averaged, in flat       ``average_gradients``
                                 buckets; a rank without any sends zeros
then, if the facts say so        one number for each loss scale                         ``share_overflow``
the end of ``join``              the masters of a rank that had inputs to the end       ``joining``
===============================  =====================================================  ==============================

A rank that waits for a message that another one never sends would wait for ever. So all must send the same number:

- torch requires that every rank has the same synchronized passes. Between two of them, ranks may differ in passes
  under ``no_sync``: one may have none. No rank can know what the others had, so every rank sends the facts at every
  step, and what follows the facts is decided by them alone. They are the same on every rank.
- ``clip_master_grads`` sends the facts only where a rank knows that they are needed. If another rank did not know, it
  sends its own at the step. The facts say which of the two calls they come from, and all ranks raise an error.
- The facts are sent on the CPU, where the answer costs no wait for the device. A process group with NCCL alone sends
  them on the device. A rank that has averaged everything does not wait for the answer there. It is *late*: it takes its
  step, and reads the answer before the next one. If others then had something left, they go on without the late rank,
  and send nothing more in this window. Before the next step every rank raises an error.
- In ``join`` a rank that ran out of inputs repeats the reductions of torch and sends nothing else. So nobody does.

``ddp_hook`` has the state of one wrapper, this module that of one optimizer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..core.errors import UsageError
from ..gradients.async_reader import AsyncReader, capturing
from ..gradients.ledger import REDUCTIONS
from ..gradients.loss_scaler import DeviceLossScaler
from .agreement import TOO_LATE, StepFacts
from .ddp_hook import Reduction
from .flat_buckets import average_gradients, share_masters, share_sparse_dims, sparse_dims

__all__ = ["BackwardRecord", "RankSync", "share_overflow"]


@dataclass(eq=False)
class BackwardRecord:
    """The overflow check of one scaled backward pass since the last step.

    Attributes:
        found_inf: 0-dim float32 tensor, 1.0 if it overflowed on this rank; after ``share_overflow``, on any rank.
        scaler: the loss scale to update with it; None if there is none or it was updated already.
        shared: whether ``found_inf`` is the same on all ranks by now.
        moves: the loss scale that an overflow lowers if it is dynamic; None for none.
    """

    found_inf: torch.Tensor
    scaler: DeviceLossScaler | None
    shared: bool = False
    moves: DeviceLossScaler | None = None

    @property
    def dynamic(self) -> bool:
        """Whether an overflow lowers the loss scale."""
        return self.moves is not None and self.moves.dynamic


class _OpenPass(NamedTuple):
    """A wrapper at the beginning of a backward pass.

    Attributes:
        reduction: that of the wrapper.
        allreduces: how many passes the ranks had averaged before.
        versions: the version of each gradient that was there, which changes when a pass adds to it.
    """

    reduction: Reduction
    allreduces: int
    versions: dict[torch.Tensor, int]


class RankSync:
    """The state of one optimizer towards the other ranks.

    Attributes:
        inside: whether the optimizer is inside of another attached one, which does all of this.
        reductions: those of the wrappers around its parameters. Without any there is nothing to do.
    """

    def __init__(self) -> None:
        self.inside = False
        self.reductions: list[Reduction] = []
        self._found: tuple[object, ...] = ()  # the wrappers and numbers that the latest search has seen
        self._open: list[_OpenPass] = []
        self._saved: dict[int, torch.Tensor] = {}  # the gradients that are set aside for the open pass
        self._averages_in_place = False  # the open pass averages gradients of earlier ones where they lie
        self._unsynced: set[Reduction] = set()  # wrappers with gradients that no backward pass has averaged
        self._had_pass = False  # in this window
        self._ever_had_pass = False
        self._ever_unsynced = False  # the ranks have averaged gradients before a step at least once
        self._too_late = False  # in this window: other ranks go on without what this one has left
        self._late_facts = AsyncReader(1)

    @property
    def joining(self) -> bool:
        """Whether some ranks may have run out of inputs, so that they take part in nothing but reductions."""
        return any(reduction.is_joining for reduction in self.reductions)

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The process groups that something can be sent to outside of a backward pass."""
        if self._too_late or self.joining:
            return []
        return _distinct(reduction.group for reduction in self.reductions if reduction.wrapper() is not None)

    @property
    def has_unsynced(self) -> bool:
        """Whether there are gradients that were not averaged over the ranks."""
        return bool(self._unsynced)

    def end_window(self) -> None:
        """The gradients were used or cleared: what comes now is another accumulation window."""
        self._unsynced.clear()
        for reduction in self.reductions:
            reduction.end_window()
        self._had_pass = self._too_late = False

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
        (factor,) = factors
        if scale is None:
            return torch.full((), 1.0 / factor, dtype=torch.float32, device=self.reductions[0].device)
        return scale / factor

    @property
    def will_sync(self) -> bool:
        """Whether the ranks will average the next backward pass."""
        return any(reduction.will_sync for reduction in self.reductions)

    def averaged_next(self, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those of some parameters whose gradients the next backward pass averages, so that they must stay in place."""
        syncing = [reduction for reduction in self.reductions if reduction.will_sync]
        found = [p for p in params if any(reduction.holds(p) for reduction in syncing)]
        self._averages_in_place = self._averages_in_place or bool(found)
        return found

    # ---- before and after a backward pass

    def find_wrappers(
        self, params: Sequence[torch.Tensor], fp32: Sequence[torch.Tensor], mastered: Sequence[torch.Tensor]
    ) -> None:
        """Find the wrappers around the parameters. A collective operation if there are new ones with masters.

        Args:
            params: those of the optimizer.
            fp32: those among them whose gradients are to be fp32.
            mastered: those whose masters are to be the same on every rank.
        """
        seen = (len(params), len(fp32), *REDUCTIONS)
        if self.inside or seen == self._found:
            return
        self._found = seen
        before = self.reductions
        candidates = [one for one in REDUCTIONS if isinstance(one, Reduction) and one.changes_gradients]
        self.reductions = [each for each in candidates if not each.params.isdisjoint(map(id, params))]
        self._unsynced.intersection_update(self.reductions)
        for reduction in self.reductions:
            if reduction not in before:
                # The wrapper gave every rank the weights of rank 0, but each rank still has its own masters.
                share_masters([p for p in mastered if reduction.holds(p)], reduction.group)
            reduction.hook(fp32)

    def begin_backward(
        self, scale: torch.Tensor | None, params: Sequence[torch.Tensor], saved: dict[int, torch.Tensor]
    ) -> None:
        """A backward pass scaled by ``scale`` begins.

        Args:
            scale: by what its gradients are to be divided.
            params: those of the optimizer.
            saved: what is set aside of their gradients; what the ranks average in this pass is taken out of it.
        """
        self._had_pass = self._ever_had_pass = True
        self._saved, self._open = saved, []
        for reduction in self.reductions:
            reduction.begin_backward(scale, params, saved)
            self._open.append(_OpenPass(reduction, reduction.allreduces, _versions(reduction, params)))

    def end_backward(self, params: Sequence[torch.Tensor]) -> None:
        """The backward pass is over: find out whether the ranks averaged its gradients."""
        for reduction, averaged, brought in self._close(params):
            if averaged:
                reduction.rebuild_buckets()
                # A pass that began unsynced can be averaged all the same. Gradients set aside were not sent then.
                if reduction.will_sync or reduction.params.isdisjoint(self._saved):
                    self._unsynced.discard(reduction)
            elif brought:
                self._unsynced.add(reduction)

    def abandon_backward(self, params: Sequence[torch.Tensor]) -> bool:
        """The backward pass failed; whether gradients accumulated before it are lost, for they were in a bucket."""
        lost = self._averages_in_place
        for _, averaged, _ in self._close(params):
            lost = lost or averaged
        return lost

    def _close(self, params: Sequence[torch.Tensor]) -> Iterator[tuple[Reduction, bool, bool]]:
        """Each wrapper of the open pass, whether the ranks averaged its gradients, and if not, whether it got any."""
        opened, self._open, self._averages_in_place = self._open, [], False
        for reduction, allreduces, before in opened:
            reduction.end_backward(self._saved)
            averaged = reduction.allreduces > allreduces or (reduction.will_sync and not reduction.hooked)
            after = {} if averaged else _versions(reduction, params)
            brought = [param for param, version in after.items() if before.get(param) != version]
            reduction.remember_unsynced(brought)
            yield reduction, averaged, bool(brought)

    # ---- before a step

    @torch.no_grad()
    def sync_gradients(
        self,
        params: Sequence[torch.Tensor],
        fp32: Sequence[torch.Tensor],
        records: list[BackwardRecord],
        scalers: Sequence[DeviceLossScaler | None],
        *,
        steps: bool = True,
    ) -> None:
        """Average the gradients that no backward pass has averaged on some rank. A collective operation.

        A rank may have had no backward pass in this window, or none after one that was averaged. It takes part with
        gradients of zero, and moves its loss scales as the others do.

        Args:
            params: those of the optimizer.
            fp32: those among them whose gradients are to be fp32 afterwards, on every rank.
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
        sparse = self._agree(params, records, scalers, steps)
        if self._too_late or not self._unsynced:
            return
        sparse |= sparse_dims(params)
        done: set[int] = set()
        for reduction in [reduction for reduction in self.reductions if reduction in self._unsynced]:
            owners = [p for p in params if reduction.holds(p) and id(p) not in done and p.requires_grad]
            done.update(map(id, owners))
            average_gradients(owners, reduction.group, reduction.world, set(map(id, fp32)), sparse)
        self._unsynced.clear()

    def _agree(
        self,
        params: Sequence[torch.Tensor],
        records: list[BackwardRecord],
        scalers: Sequence[DeviceLossScaler | None],
        steps: bool,
    ) -> dict[int, int]:
        """Exchange the facts: afterwards this rank counts as unsynced whatever some rank has left.

        Returns:
            The number of sparse dimensions of gradients that are sparse on some rank, by the identity of the parameter.
        """
        no_gradients = not (self._had_pass or records) and (self._ever_had_pass or all(p.grad is None for p in params))
        waits = bool(no_gradients or self._unsynced or self._ever_unsynced)
        asks = steps and self._ever_had_pass and not capturing(self.reductions[0].device)
        if self._too_late or not (waits or asks):
            return {}
        if any(late for (late,) in self._late_facts.poll(wait=True)):
            raise UsageError(TOO_LATE)
        unshared = {record.scaler for record in records if not record.shared}
        expected = list(dict.fromkeys(record.scaler for record in records)) or scalers
        # Gradients that were averaged are the same everywhere: only a rank with others has to look.
        sparse = sparse_dims(params) if self._unsynced else {}
        others_have_unshared = False
        for group in self.groups:
            mine = [reduction for reduction in self.reductions if reduction.group is group]
            late = not (waits or mine[0].has_cpu)
            device = torch.device("cpu") if mine[0].has_cpu else mine[0].device
            scales = len(unshared or expected)
            shared = StepFacts(
                tuple(reduction in self._unsynced for reduction in mine),
                late=late,
                steps=steps,
                clips=not steps,
                sparse=bool(sparse),
                unshared=bool(unshared),
                scales=scales,
                minus_scales=-scales,
            ).share(group, device)
            if late:
                self._late_facts.post(StepFacts.too_late(shared))
                continue
            facts = StepFacts.read(shared)
            if facts.late and any(facts.unsynced):
                self._late_facts.post(StepFacts.too_late(shared))
                self._too_late = True
                continue
            facts.refuse_differences(len(unshared))
            others_have_unshared = others_have_unshared or bool(facts.unshared)
            self._unsynced.update(reduction for reduction, one in zip(mine, facts.unsynced, strict=True) if one)
            self._ever_unsynced = self._ever_unsynced or any(facts.unsynced)
            if facts.sparse:
                sparse = share_sparse_dims(params, sparse, group, device)
        if others_have_unshared and not unshared:
            for scaler in expected:
                found_inf = torch.zeros((), dtype=torch.float32, device=self.reductions[0].device)
                records.append(BackwardRecord(found_inf, scaler, moves=scaler))
        return sparse


def share_overflow(
    records: Collection[BackwardRecord], ranks: Iterable[RankSync]
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
    if new and (groups := _distinct(group for one in ranks for group in one.groups)):
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
    for record in records:
        record.shared = True
    return shared


def _distinct(groups: Iterable[dist.ProcessGroup]) -> list[dist.ProcessGroup]:
    """Process groups without repetition, in their order."""
    return list({id(group): group for group in groups}.values())


def _versions(reduction: Reduction, params: Sequence[torch.Tensor]) -> dict[torch.Tensor, int]:
    """The version of each gradient of a wrapper, which changes when a backward pass adds to it."""
    return {p: p.grad._version for p in params if p.grad is not None and reduction.holds(p)}
