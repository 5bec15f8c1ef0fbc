"""The message that ranks exchange before a step: a few numbers, which are to be the same on every rank.

``ddp_sync`` says when.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..core.errors import UsageError

__all__ = ["StepFacts", "refuse_differences"]


class StepFacts(NamedTuple):
    """The facts of one rank before a step.

    Attributes:
        steps: 1 if the rank is about to step, 0 if it is about to clip gradients.
        scales: the number of loss scales with overflow checks that were not shared.
        unsynced: for each wrapper, the number of backward passes since the latest one that the ranks averaged.
    """

    steps: int
    scales: int
    unsynced: tuple[int, ...]

    def differences(self, group: dist.ProcessGroup, device: torch.device) -> torch.Tensor:
        """By how much ranks differ, from one message: in ``steps``, ``scales``, and most in any of ``unsynced``."""
        mine = torch.tensor([self.steps, self.scales, *self.unsynced], dtype=torch.float32, device=device)
        largest = torch.cat([mine, -mine])
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        found = largest.view(2, -1).sum(0)
        return torch.stack([found[0], found[1], found[2:].amax()])


def refuse_differences(differences: Sequence[float], *, late: bool = False) -> None:
    """Refuse to go on if any fact differs between ranks; ``late`` if these are the facts of the step before.

    Raises:
        UsageError: on every rank.
    """
    steps, scales, unsynced = differences
    if unsynced:
        problem = "had different numbers of backward passes in no_sync() after the last synced pass"
        remedy = "Give every rank as many passes as the others; without a batch, a pass on any loss times zero."
    elif steps:
        problem = "called clip_master_grads, and others went on to the step"
        remedy = "Call it on every rank."
    elif scales:
        problem = "had backward passes of different numbers of loss scales"
        remedy = "Call scale_loss for every loss on every rank; without a batch, on any loss times zero."
    else:
        return
    when = "Before the previous step" if late else "Before this step"
    parted = (
        " The ranks have taken that step, so their weights differ now. Ranks hear of it in time over the "
        'CPU: init_process_group("cpu:gloo,cuda:nccl").'
    )
    raise UsageError(f"{when} some ranks {problem}. {remedy}{parted if late else ''}")
