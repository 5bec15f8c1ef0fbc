"""The message of each rank to the others before a step: a few numbers, of which all ranks get the largest.

``ddp_sync`` says when, and does what follows from it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from ..core.errors import UsageError

__all__ = ["StepFacts", "refuse_too_late"]

_NONE = -(2.0**20)  # stands for "no such rank" where the largest number counts


class StepFacts(NamedTuple):
    """The knowledge of one rank before a step, or of all of them together.

    Attributes:
        late: whether it reads the answer only before its next step, when it is too late to do anything in this one.
        left: whether gradients were not averaged by a backward pass.
        steps: whether it is about to step.
        clips: whether it is about to clip gradients.
        sparse: whether any gradient of a rank with such gradients is sparse.
        scales: the number of loss scales with news about overflows, and minus that number, of which the largest is
            the smallest number; the same two of a rank without news, for the loss scales that it takes for the same.
        unsynced: for each wrapper, whether gradients were not averaged by a backward pass.
    """

    late: bool
    left: bool
    steps: bool
    clips: bool
    sparse: bool
    scales: tuple[float, float, float, float]
    unsynced: tuple[bool, ...]

    @classmethod
    def of_rank(
        cls, unsynced: list[bool], *, late: bool, steps: bool, sparse: bool, news: int, missing: int
    ) -> StepFacts:
        """Those of this rank; ``news`` and ``missing`` are its numbers of loss scales."""
        told = (news, -news, _NONE, _NONE) if news else (_NONE, _NONE, missing, -missing)
        return cls(late, any(unsynced), steps, not steps, sparse, told, tuple(unsynced))

    def share(self, group: dist.ProcessGroup, device: torch.device) -> torch.Tensor:
        """The facts of all ranks, for ``read``. Its first two elements are ``late`` and ``left``."""
        flags, scales, unsynced = self[:5], self.scales, self.unsynced
        told = torch.tensor([*flags, *scales, *unsynced], dtype=torch.float32, device=device)
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=group)
        return told

    @classmethod
    def read(cls, told: torch.Tensor) -> StepFacts:
        """The result of ``share``, on the host."""
        late, left, steps, clips, sparse, *rest = told.tolist()
        unsynced = tuple(map(bool, rest[4:]))
        most, fewest, most_missing, fewest_missing = rest[:4]
        scales = (most, fewest, most_missing, fewest_missing)
        return cls(bool(late), bool(left), bool(steps), bool(clips), bool(sparse), scales, unsynced)

    @property
    def any_news(self) -> bool:
        """Whether some rank has news about overflows."""
        return self.scales[0] != _NONE

    def refuse_differences(self, news: int) -> None:
        """Refuse what the ranks cannot do together; ``news`` is the number of this rank.

        Raises:
            UsageError: on every rank.
        """
        if self.steps and self.clips:
            raise UsageError(
                "clip_master_grads was called on some ranks, while others went on to the step. Call it on every rank. "
                "If you do, then some ranks had backward passes after the last synced pass of this window and others "
                "had none: the first time this can be averaged in the step alone. End every window with a synced pass."
            )
        most, fewest, most_missing, fewest_missing = self.scales
        followed = most_missing == _NONE or most_missing == -fewest_missing == most
        if self.any_news and not (most == -fewest and followed):
            raise UsageError(
                f"Before this step this rank had backward passes of {news} loss scales, and another rank of another "
                "number. Call scale_loss for every loss on every rank; without a batch, on any loss times zero."
            )


def refuse_too_late() -> None:
    """Refuse to go on after a step in which ranks differed without knowing it.

    Raises:
        UsageError: always.
    """
    raise UsageError(
        "Before the previous step some ranks had backward passes in no_sync() after the last synced pass, and others "
        "had none. Those have stepped without these gradients, so the weights of the ranks differ now. End every "
        "window with a synced pass, on every rank; or let ranks tell each other of it in time, over the CPU: "
        'init_process_group("cpu:gloo,cuda:nccl").'
    )
