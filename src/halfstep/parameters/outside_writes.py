"""Writes to 16-bit weights that must be copied to their plain masters: by user code between steps, or by a step."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from ..core.errors import UsageError
from ..kernels.expr import elementwise_kernel
from ..kernels.launch import launch
from ..kernels.multi_tensor import group_rows
from ..kernels.storage import after_writes, dense, plain
from ..kernels.tensor_table import TensorTable
from .snapshot import Snapshot
from .table import Slot

__all__ = ["OutsideWrites", "StepWrites"]

logger = logging.getLogger("halfstep")

_IDLE = 60  # steps without a change before a warning; an optimizer may accumulate gradients or warm up first
_WRITING = 20  # the number of such steps for which one step counts that changes weights but no masters


@elementwise_kernel()
def honour_kernel(master: Any, weight: Any) -> dict[str, Any]:
    """Write ``master = weight``. The ``weight`` column reads as the master, unless the weight is not its rounding."""
    return {"master": weight}


class OutsideWrites:
    """Copies user writes to weights into their masters between steps, with one kernel per dtype and device.

    The tables of the kernels are valid until the memory of a tensor changes, for example by ``p.data = x``.

    Args:
        weights: 16-bit weights.
        masters: their masters.
    """

    def __init__(self, weights: Sequence[torch.Tensor], masters: Sequence[torch.Tensor]) -> None:
        self._weights, self._masters = weights, masters
        self._tables: list[tuple[list[torch.Tensor], TensorTable]] = []

    @torch.no_grad()
    def honour(self) -> None:
        """Write ``master = after_writes(master, weight)`` for each pair."""
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
    """Writes of a step to weights instead of masters, by an optimizer that keeps its own list of weights."""

    def __init__(self) -> None:
        self._before: list[tuple[Slot, Snapshot, Snapshot]] = []  # rows with their weights and masters before the step
        self._steps_masters = False  # True once a step wrote to any master
        # Counts steps that changed no master. It starts at -1 because the snapshots of a first step on a GPU compare
        # versions only, and a fused or foreach step changes no version.
        self._idle = -1

    def begin(self, slots: Sequence[Slot], grads: Sequence[torch.Tensor | None]) -> None:
        """Take snapshots, before a step, of the weights that have gradients and whose masters no step wrote to yet."""
        self._before = []
        for slot, grad in zip(slots, grads, strict=True):
            if grad is not None and slot.master is not None and not slot.steps_master:
                looks = slot.param.device.type == "cpu" or self._idle >= 0
                both = [Snapshot(each, by_value=looks) for each in (slot.param, slot.master.read())]
                self._before.append((slot, both[0], both[1]))

    def check(self, optimizer: Any) -> None:
        """Check after a third-party optimizer's step that it wrote to masters.

        Raises:
            UsageError: if the step wrote to a parameter that has a gradient, but not to its master.
        """
        if not self._before or self._idle >= _IDLE:
            return
        moved = [master.written for _, _, master in self._before]
        for (_, weight, _), has_moved in zip(self._before, moved, strict=True):
            if weight.versioned and not has_moved:
                raise UsageError(
                    f"{type(optimizer).__name__}.step wrote to a 16-bit weight of shape {tuple(weight.tensor.shape)} "
                    "instead of its fp32 master, which is in param_groups during a step. The optimizer keeps its own "
                    "list of weights, and small updates would be lost. Let it iterate over self.param_groups, or train "
                    "at O1, where weights are fp32."
                )
        if any(moved) or self._steps_masters:  # a step need not update every weight
            return
        self._idle += _WRITING if any(weight.changed for _, weight, _ in self._before) else 1
        if self._idle >= _IDLE:
            logger.warning(
                "No step of %s has changed an fp32 master so far, although there were gradients. If it updates weights "
                "from its own list or copy, let it iterate over self.param_groups, which hold the masters during a "
                "step. If its learning rate is still 0, or it is still accumulating gradients, ignore this warning.",
                type(optimizer).__name__,
            )

    @torch.no_grad()
    def end(self) -> None:
        """Copy writes of a step to weights into their masters, if the step did not write to the master."""
        before, self._before = self._before, []
        for slot, weight, master in before:
            if master.written:
                slot.steps_master = self._steps_masters = True
            elif weight.changed:
                master.tensor.copy_(after_writes(master.tensor, weight.tensor))
