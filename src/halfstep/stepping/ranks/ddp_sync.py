"""The protocol of the ranks: all ranks step with the same gradients, or no rank steps.

Every rank runs the same script on different data. The messages for one optimizer, in this order:

===============================  =====================================================  ==============================
time                             message of every rank                                  sender
===============================  =====================================================  ==============================
the first block or step with     the masters of the first rank, in flat buckets         ``find_wrappers``
a new wrapper
a backward pass that DDP         its buckets, including the gradients that earlier      ``DDPHook.communicate``
synchronizes                     passes of this rank have accumulated
the end of such a pass, if       one flag per loss scale: the pass overflowed           ``share_overflow``
the loss is scaled
every step, and                  the facts: a few numbers that must be the same on      ``RankSync._compare``
``clip_master_grads`` after a    every rank
pass that was not synchronized
then, after such a pass          the kind of each parameter's gradient (none, dense,    ``average_gradients``
                                 count of sparse dimensions); then the gradients, in
                                 flat buckets
then, after such a pass          one flag per loss scale                                ``share_overflow``
the end of ``join``              the masters of a rank that had inputs to the end       ``joining``
===============================  =====================================================  ==============================

A rank that waits for a message that another rank never sends hangs, so all ranks must send the same messages:

- DDP requires that every rank has the same synchronized passes. After the last synchronized pass, ranks must have the
  same count of passes under ``no_sync``. The facts contain this count. Ranks compare the facts before they send any
  gradient, and all ranks raise an error if the facts differ.
- ``clip_master_grads`` sends the facts only after a pass under ``no_sync``. A rank without such a pass sends its facts
  at the step. The facts contain the call that sent them, so that all ranks raise an error.
- Ranks send the facts on the CPU, where reading the answer does not wait for the device. A process group with only
  NCCL sends them on the device. There, a rank whose gradients are all averaged does not wait for the answer: it takes
  its step, and reads the answer before the next step. If the answer shows that other ranks have gradients left, those
  ranks send nothing more in this window, and every rank raises an error before the next step.
- In ``join`` a rank that has run out of inputs repeats DDP's reductions and sends nothing else, so the active ranks
  also send nothing else.

``ddp_hook`` has the state of one wrapper; this module has the state of one optimizer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ...core.errors import UsageError
from ...parameters.async_reader import AsyncReader, capturing
from ...parameters.loss_scaler import DeviceLossScaler
from ...parameters.table import REDUCTIONS, Slot
from .ddp_hook import DDPHook
from .flat_buckets import average_gradients, share_masters
from .joining import is_joining

__all__ = ["BackwardRecord", "RankSync", "share_overflow"]


@dataclass(eq=False)
class BackwardRecord:
    """The overflow check of one scaled backward pass since the last step.

    Attributes:
        found_inf: 0-dim float32 tensor, 1.0 if the pass overflowed on this rank; after ``share_overflow``, on any rank.
        pending_scaler: the loss scaler to update with ``found_inf``; None if there is none or it is already updated.
        shared: True if ``found_inf`` is already the same on all ranks.
        scaler: the loss scaler that an overflow of the pass lowers; None if an overflow only skips the step.
    """

    found_inf: torch.Tensor
    pending_scaler: DeviceLossScaler | None
    shared: bool = False
    scaler: DeviceLossScaler | None = None

    @property
    def dynamic(self) -> bool:
        """True if an overflow lowers the loss scale."""
        return self.scaler is not None and self.scaler.dynamic


class RankSync:
    """The messages of one optimizer to other ranks.

    Attributes:
        reductions: the reductions of the wrappers around the optimizer's parameters. Without a wrapper the optimizer
            sends nothing.
        unsynced: the count of passes since the ranks averaged the gradients of a wrapper, if there is such a pass.
    """

    def __init__(self) -> None:
        self.reductions: list[DDPHook] = []
        self._found: tuple[object, ...] = ()  # the wrappers and counts of parameters at the latest search
        # In a backward pass: each wrapper, its count of averaged passes before, and the versions of its gradients.
        self._open: list[tuple[DDPHook, int, dict[torch.Tensor, int]]] = []
        self._slots: Sequence[Slot] = ()  # the rows of the optimizer in the open pass
        self._averages_in_place = False  # the open pass averages gradients of earlier passes in place
        self.unsynced: dict[DDPHook, int] = {}
        self._had_pass = False
        # True if ranks differ in this window, and some ranks read this only after their step. Those ranks step without
        # another message, so this rank must not send any: it would wait for them forever.
        self._ranks_differ = False
        self._late = AsyncReader(3)  # differences between ranks that the host reads after the step

    @property
    def joining(self) -> bool:
        """True if some ranks may have run out of inputs, so that they take part in DDP's reductions only."""
        return any(is_joining(reduction.wrapper()) for reduction in self.reductions)

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The process groups that can take a message outside a backward pass.

        Raises:
            RuntimeError: raised by DDP if a reduction has not finished because a rank did not use all parameters. The
                other ranks wait in this reduction, and would take our message for a part of it.
        """
        if self._ranks_differ or self.joining:
            return []
        for reduction in self.reductions:
            reduction.rebuild_buckets()
        return _distinct(reduction.group for reduction in self.reductions if reduction.wrapper() is not None)

    def end_window(self) -> None:
        """End the accumulation window after a step or ``zero_grad``."""
        self.unsynced.clear()
        for reduction in self.reductions:
            reduction.end_window()
        self._ranks_differ = False

    def gradient_scale(self, scale: torch.Tensor | None) -> torch.Tensor | None:
        """Return the divisor of the gradients of a pass whose loss is multiplied by ``scale``.

        In a block, ranks always send means. Averaging an average changes nothing, so any mix of synced and unsynced
        passes gives correct gradients. If the user requested the sum (``gradient_average=False``), the factor between
        the sum and the mean becomes a part of the loss scale.

        Raises:
            UsageError: if the wrappers around one optimizer's parameters have different factors.
        """
        factors = {reduction.factor for reduction in self.reductions}
        if factors <= {1.0}:
            return scale
        if len(factors) > 1:
            raise UsageError(
                "The parameters of one optimizer are in DistributedDataParallel wrappers with different "
                "gradient_average or gradient_predivide_factor; use equal settings, or one optimizer per wrapper."
            )
        (factor,) = factors
        if scale is None:
            return torch.full((), 1.0 / factor, dtype=torch.float32, device=self.reductions[0].device)
        return scale / factor

    @property
    def will_sync(self) -> bool:
        """True if the ranks will average the gradients of the next backward pass."""
        return any(reduction.will_sync for reduction in self.reductions)

    def averaged_next(self, slots: Sequence[Slot]) -> list[Slot]:
        """Return the slots whose gradients the next backward pass averages in place: none with fp32 gradients."""
        syncing = [reduction for reduction in self.reductions if reduction.will_sync]
        found = [slot for slot in slots if not slot.fp32 and any(each.holds(slot.param) for each in syncing)]
        self._averages_in_place = self._averages_in_place or bool(found)
        return found

    # ---- before and after a backward pass

    def find_wrappers(
        self, params: Sequence[torch.Tensor], fp32: Sequence[torch.Tensor], mastered: Sequence[torch.Tensor]
    ) -> None:
        """Find the wrappers around the parameters. A collective operation if there are new ones with masters.

        Args:
            params: the parameters of the optimizer.
            fp32: the parameters that get fp32 gradients.
            mastered: the parameters whose masters must be the same on every rank.
        """
        seen = (len(params), len(fp32), *REDUCTIONS)
        if seen == self._found:
            return
        self._found = seen
        before = self.reductions
        candidates = [one for one in REDUCTIONS if isinstance(one, DDPHook) and one.changes_gradients]
        self.reductions = [each for each in candidates if not each.params.isdisjoint(map(id, params))]
        self.unsynced = {each: passes for each, passes in self.unsynced.items() if each in self.reductions}
        for reduction in self.reductions:
            if reduction not in before:
                # The wrapper gave every rank the weights of rank 0, but each rank still has its own masters.
                share_masters([p for p in mastered if reduction.holds(p)], reduction.group)
            reduction.hook(fp32)

    def abandon_plain(self) -> None:
        """Forget passes without a block when a block opens: if such a pass is still open, it has failed."""
        for reduction in self.reductions:
            reduction.abandon_plain()

    def begin_backward(self, scale: torch.Tensor | None, slots: Sequence[Slot]) -> None:
        """Begin a backward pass.

        Args:
            scale: the divisor of the gradients of the pass.
            slots: the rows of the optimizer. The communication hook takes set-aside gradients out of these rows when it
                adds them to a bucket.
        """
        self._had_pass = True
        self._slots, self._open = slots, []
        for reduction in self.reductions:
            reduction.begin_backward(self, scale, slots)
            self._open.append((reduction, reduction.allreduces, _versions(reduction, slots)))

    def end_backward(self) -> None:
        """End the backward pass, and note which wrappers averaged their gradients."""
        for reduction, averaged, brought in self._close():
            if averaged:
                reduction.rebuild_buckets()
                # Ranks can average a pass that began unsynced. They did not send the set-aside gradients in this case.
                saved = [slot.param for slot in self._slots if slot.grad.saved is not None]
                if reduction.will_sync or not any(map(reduction.holds, saved)):
                    self.unsynced.pop(reduction, None)
            elif brought or not reduction.will_sync:
                self.unsynced[reduction] = self.unsynced.get(reduction, 0) + 1

    @torch.no_grad()
    def abandon_backward(self, arrived: bool) -> bool:
        """True if a failed backward pass has lost the gradients accumulated before it, which were in a bucket.

        A pass that failed before its first gradient has sent nothing and lost nothing. Gradients that it left in place,
        multiplied by the loss scale, are divided again.

        Args:
            arrived: True if a parameter has a gradient that had none when the pass began.
        """
        began = arrived or not self._open
        for reduction, allreduces, before in self._open:
            began = began or reduction.allreduces > allreduces or _versions(reduction, self._slots) != before
        for reduction, _, before in [] if began else self._open:
            for param in before if reduction.scale is not None else ():
                param.grad.div_(reduction.scale)  # type: ignore[union-attr, arg-type]
        carried = self._averages_in_place
        closed = list(self._close())
        return began and (carried or any(averaged for _, averaged, _ in closed))

    def _close(self) -> Iterator[tuple[DDPHook, bool, bool]]:
        """Yield each wrapper of the open pass, with two flags: ranks averaged its gradients; it got unaveraged ones."""
        opened, self._open, self._averages_in_place = self._open, [], False
        for reduction, allreduces, before in opened:
            reduction.end_backward(self)
            averaged = reduction.allreduces > allreduces or (reduction.will_sync and not reduction.hooked)
            after = {} if averaged else _versions(reduction, self._slots)
            brought = [param for param, version in after.items() if before.get(param) != version]
            reduction.remember_unsynced(brought)
            yield reduction, averaged, bool(brought)

    # ---- before a step

    @torch.no_grad()
    def sync_gradients(
        self,
        params: Sequence[torch.Tensor],
        fp32: Sequence[torch.Tensor],
        records: Sequence[BackwardRecord],
        *,
        steps: bool = True,
    ) -> None:
        """Average the gradients that no backward pass has averaged. A collective operation.

        Args:
            params: the parameters of the optimizer.
            fp32: the parameters that have fp32 gradients afterwards, on every rank.
            records: the records of this window.
            steps: True if a step follows. If not, a rank whose last pass was averaged need not take part.

        Raises:
            UsageError: on every rank, if ranks differ in their passes since the last synced pass, or if only some ranks
                clip gradients that were not averaged.
        """
        if self.joining:
            if self.unsynced:
                raise UsageError(
                    "In DistributedDataParallel.join() the last backward pass before a step must not be in no_sync(): "
                    "ranks that have run out of inputs take part in the reductions of backward passes only."
                )
            return
        # In a loop without blocks a rank has gradients, and need not compare anything.
        asks = steps and (self._had_pass or all(p.grad is None for p in params))
        if not self._ranks_differ and (self.unsynced or (asks and not capturing(self.reductions[0].device))):
            scales = len({record.pending_scaler for record in records if not record.shared})
            self._compare(steps, scales)
        done: set[int] = set()
        for reduction in [] if self._ranks_differ else [each for each in self.reductions if each in self.unsynced]:
            owners = [p for p in params if reduction.holds(p) and id(p) not in done]
            done.update(map(id, owners))
            average_gradients(owners, reduction.group, reduction.message_device, set(map(id, fp32)))
        self.unsynced.clear()

    def _compare(self, steps: bool, scales: int) -> None:
        """Exchange the facts, and raise an error on every rank if they differ."""
        for before in self._late.poll(wait=True):
            _refuse(before, "Before the previous step", _LATE)
        for group in self.groups:
            mine = [reduction for reduction in self.reductions if reduction.group is group]
            facts = [int(steps), scales, *(self.unsynced.get(reduction, 0) for reduction in mine)]
            both = [*facts, *(-fact for fact in facts)]
            largest = torch.tensor(both, dtype=torch.float32, device=mine[0].message_device)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
            differences = largest.view(2, -1).sum(0)
            found = (differences[2:].amax(), differences[0], differences[1])
            if mine[0].has_cpu:
                _refuse(found)
            else:
                self._late.post(*found)
                self._ranks_differ = bool(self.unsynced) and bool(differences.any())


_PROBLEMS = (
    (
        "had different numbers of backward passes in no_sync() after the last synced pass",
        "Run the same number of passes on every rank; on a rank without a batch, use any loss times zero.",
    ),
    ("called clip_master_grads, and other ranks did not", "Call it on every rank."),
    (
        "had backward passes with different numbers of loss scales",
        "Call scale_loss for every loss on every rank; on a rank without a batch, use any loss times zero.",
    ),
)
_LATE = (
    " The ranks have already taken that step, so their weights differ now. To find this before the step, add a CPU "
    'backend: init_process_group("cpu:gloo,cuda:nccl").'
)


def _refuse(differences: Iterable[float | torch.Tensor], when: str = "Before this step", then: str = "") -> None:
    """Refuse to continue if ranks differ in any of ``_PROBLEMS``.

    Raises:
        UsageError: on every rank.
    """
    for (problem, remedy), difference in zip(_PROBLEMS, differences, strict=True):
        if difference:
            raise UsageError(f"{when} some ranks {problem}. {remedy}{then}")


def share_overflow(
    records: Collection[BackwardRecord], ranks: Iterable[RankSync]
) -> dict[DeviceLossScaler, torch.Tensor]:
    """Share overflows between the ranks by one all-reduce of one flag per loss scale.

    Args:
        records: the records of an accumulation window. ``found_inf`` of records that are not shared yet changes in
            place.
        ranks: the messages of the optimizers whose process groups take part. Without a process group, nothing is sent.

    Returns:
        For each loss scale with new records, a flag that is 1.0 if one of its passes overflowed on any rank. Only the
        first overflow of a window counts.
    """
    new: dict[DeviceLossScaler | None, list[BackwardRecord]] = {}
    before: dict[DeviceLossScaler | None, list[torch.Tensor]] = {}
    for record in records:
        if record.shared:
            before.setdefault(record.pending_scaler, []).append(record.found_inf)
        else:
            new.setdefault(record.pending_scaler, []).append(record)
    shared = {scaler: row[-1].found_inf for scaler, row in new.items() if scaler is not None}
    # In ``join`` ranks need no message: after an overflow the averaged gradients are not finite on any rank.
    if new and (groups := _distinct(group for one in ranks for group in one.groups)):
        device = next(iter(new.values()))[0].found_inf.device
        verdicts = torch.stack([torch.stack([p.found_inf.to(device) for p in row]).amax() for row in new.values()])
        for group in groups:
            dist.all_reduce(verdicts, op=dist.ReduceOp.MAX, group=group)
        for verdict, (scaler, row) in zip(verdicts.unbind(), new.items(), strict=True):
            for record in row:
                record.found_inf.copy_(verdict)
            if scaler in shared and scaler in before:
                # An overflow stays in averaged gradients, so a later pass of the window finds the same overflow again.
                shared[scaler] = verdict * (torch.stack(before[scaler]).amax() == 0)
    for record in records:
        record.shared = True
    return shared


def _distinct(groups: Iterable[dist.ProcessGroup]) -> list[dist.ProcessGroup]:
    """Return process groups without repetition, in their order."""
    return list({id(group): group for group in groups}.values())


def _versions(reduction: DDPHook, slots: Sequence[Slot]) -> dict[torch.Tensor, int]:
    """Return the version of each gradient of a wrapper, which changes when a backward pass adds to the gradient."""
    return {s.param: s.param.grad._version for s in slots if s.param.grad is not None and reduction.holds(s.param)}
