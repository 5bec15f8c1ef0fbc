"""Writes to 16-bit weights that have not reached their plain masters: between two steps, or by a step."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from ..core.errors import UsageError
from ..kernels.expr import elementwise_kernel
from ..kernels.launch import launch
from ..kernels.multi_tensor import group_rows
from ..kernels.storage import dense, honoured, plain
from ..kernels.tensor_table import TensorTable
from .snapshot import Snapshot
from .table import Slot

__all__ = ["OutsideWrites", "StepWrites"]

logger = logging.getLogger("halfstep")

_IDLE = 60  # steps that change nothing, after which this is said: an optimizer may accumulate gradients, or warm up
_WRITING = 20  # so many of them does a step stand for that writes to weights, and not to their masters


@elementwise_kernel()
def honour_kernel(master: Any, weight: Any) -> dict[str, Any]:
    """``master = weight``, where the value of ``weight`` is its master unless it is not that rounded."""
    return {"master": weight}


class OutsideWrites:
    """Writes between two steps: one kernel for each kind of weights copies them into the masters.

    The tables of the kernels are kept, unless a tensor moves in memory: ``p.data = x`` moves one.

    Args:
        weights: 16-bit weights.
        masters: the master of each.
    """

    def __init__(self, weights: Sequence[torch.Tensor], masters: Sequence[torch.Tensor]) -> None:
        self._weights, self._masters = weights, masters
        self._tables: list[tuple[list[torch.Tensor], TensorTable]] = []

    @torch.no_grad()
    def honour(self) -> None:
        """``master = honoured(master, weight)`` for each pair."""
        if not self._tables or not all(table.renew(mine) for mine, table in self._tables):
            weights, masters = self._weights, self._masters
            kinds = group_rows(weights)
            self._tables = [_table([weights[i] for i in rows], [masters[i] for i in rows]) for rows in kinds]
        for _, table in self._tables:
            launch(table, honour_kernel, {})


def _table(weights: list[torch.Tensor], masters: list[torch.Tensor]) -> tuple[list[torch.Tensor], TensorTable]:
    columns = {"master": (dense(torch.float32), (masters,)), "weight": (plain(weights[0].dtype), (masters, weights))}
    return masters, TensorTable(columns)


class StepWrites:
    """Writes of a step to weights instead of masters: an optimizer that keeps its own list of weights makes them."""

    def __init__(self) -> None:
        self._before: list[tuple[Slot, Snapshot, Snapshot]] = []  # weights and masters of these rows
        self._steps_masters = False  # a step has written to some master
        self._idle = -1  # grows with steps that changed no master; the first may have changed no version all the same

    def begin(self, slots: Sequence[Slot], grads: Sequence[torch.Tensor | None]) -> None:
        """Before a step: note the weights that have gradients, and masters that no step has written to yet."""
        self._before = []
        for slot, grad in zip(slots, grads, strict=True):
            if grad is not None and slot.master is not None and not slot.steps_master:
                looks = slot.param.device.type == "cpu" or self._idle >= 0
                both = [Snapshot(each, by_value=looks) for each in (slot.param, slot.master.read())]
                self._before.append((slot, both[0], both[1]))

    def check(self, optimizer: Any) -> None:
        """After a step of an optimizer whose step is its own: it has to change masters.

        Raises:
            UsageError: if the step wrote to a parameter that has a gradient and not to its master.
        """
        if not self._before or self._idle >= _IDLE:
            return
        moved = [master.written for _, _, master in self._before]
        for (_, weight, _), has_moved in zip(self._before, moved, strict=True):
            if weight.versioned and not has_moved:
                raise UsageError(
                    f"{type(optimizer).__name__}.step wrote to a 16-bit weight, of shape {tuple(weight.tensor.shape)}, "
                    "and not to its fp32 master, which is in its param_groups while it steps: it keeps a list of the "
                    "weights of its own, and small updates would be lost. Have it go through self.param_groups, or "
                    "train at O1, where the weights are fp32."
                )
        if any(moved) or self._steps_masters:  # a step may leave out some weights
            return
        self._idle += _WRITING if any(weight.changed for _, weight, _ in self._before) else 1
        if self._idle >= _IDLE:
            logger.warning(
                "No step of %s has changed an fp32 master so far, although there were gradients. If it steps weights "
                "by a list or a copy of its own, have it go through self.param_groups, where the masters are while it "
                "steps. If its learning rate is still 0, or it is still accumulating gradients, all is well.",
                type(optimizer).__name__,
            )

    @torch.no_grad()
    def end(self) -> None:
        """After a step: copy what it wrote to weights into their masters, where it left these as they were."""
        before, self._before = self._before, []
        for slot, weight, master in before:
            if master.written:
                slot.steps_master = self._steps_masters = True
            elif weight.changed:
                master.tensor.copy_(honoured(master.tensor, weight.tensor))
