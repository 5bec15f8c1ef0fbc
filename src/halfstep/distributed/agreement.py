"""The message that ranks exchange before a step: a few numbers, of which all ranks get the largest.

``ddp_sync`` says when, and does what follows from it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from ..core.errors import UsageError

__all__ = ["TOO_LATE", "StepFacts"]

TOO_LATE = (
    "Before the previous step some ranks had backward passes in no_sync() after the last synced pass, and others "
    "had none. Those have stepped without these gradients, so the weights of the ranks differ now. End every "
    "window with a synced pass, on every rank; or let ranks tell each other of it in time, over the CPU: "
    'init_process_group("cpu:gloo,cuda:nccl").'
)
"""The error after a step in which ranks differed without knowing it."""


class StepFacts(NamedTuple):
    """The facts of one rank before a step, or the largest of all ranks: each of them 0 or 1, or a number.

    Attributes:
        unsynced: for each wrapper, whether a rank has gradients that no backward pass has averaged.
        late: a rank reads the answer only before its next step, when it is too late to do anything in this one.
        steps: a rank is about to step.
        clips: a rank is about to clip gradients.
        sparse: a gradient that was not averaged is sparse.
        unshared: a rank has overflow checks that were not shared.
        scales: the number of loss scales that these are of, or that a rank without any would share.
        minus_scales: minus that number, of which the largest is the smallest number.
    """

    unsynced: tuple[int, ...]
    late: int
    steps: int
    clips: int
    sparse: int
    unshared: int
    scales: int
    minus_scales: int

    def share(self, group: dist.ProcessGroup, device: torch.device) -> torch.Tensor:
        """The facts of all ranks, for ``read``."""
        shared = torch.tensor([*self[1:], *self.unsynced], dtype=torch.float32, device=device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=group)
        return shared

    @classmethod
    def read(cls, shared: torch.Tensor) -> StepFacts:
        """The result of ``share``, on the host."""
        facts = list(map(int, shared.tolist()))
        return cls(tuple(facts[_ABOUT_RANK:]), *facts[:_ABOUT_RANK])

    @staticmethod
    def too_late(shared: torch.Tensor) -> torch.Tensor:
        """From the result of ``share``, without a read: 1.0 if it was too late to average what some rank has left."""
        return shared[0] * shared[_ABOUT_RANK:].amax()

    def refuse_differences(self, scales: int) -> None:
        """Refuse what the ranks cannot do together; ``scales`` is the number of this rank.

        Raises:
            UsageError: on every rank.
        """
        if self.steps and self.clips:
            raise UsageError(
                "clip_master_grads was called on some ranks, while others went on to the step. Call it on every rank. "
                "If you do, then some ranks had backward passes after the last synced pass of this window and others "
                "had none: the first time this can be averaged in the step alone. End every window with a synced pass."
            )
        if self.unshared and self.scales != -self.minus_scales:
            raise UsageError(
                f"Before this step this rank had backward passes of {scales} loss scales, and another rank of another "
                "number. Call scale_loss for every loss on every rank; without a batch, on any loss times zero."
            )


_ABOUT_RANK = len(StepFacts._fields) - 1  # numbers that come before those of each wrapper
