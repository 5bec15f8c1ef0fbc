"""Writes to 16-bit weights that have not reached their plain masters: between two steps, or by a step."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from operator import is_
from typing import Any

import torch

from ..core.errors import UsageError
from ..kernels.expr import elementwise_kernel
from ..kernels.launch import launch
from ..kernels.multi_tensor import group_rows
from ..kernels.shards import local
from ..kernels.storage import dense, honoured, plain
from ..kernels.tensor_table import TensorTable

__all__ = ["OutsideWrites", "StepWrites"]

logger = logging.getLogger("halfstep")

_IDLE = 3  # steps that change no master, after which this is said


@elementwise_kernel()
def honour_kernel(master: Any, weight: Any) -> dict[str, Any]:
    """``master = weight``, where the value of ``weight`` is its master unless it is not that rounded."""
    return {"master": weight}


class OutsideWrites:
    """Writes between two steps: one kernel for each kind of weights copies them into the masters.

    The tables of the kernels are kept as long as the same tensors are given again.
    """

    def __init__(self) -> None:
        self._weights: list[torch.Tensor] = []
        self._masters: list[torch.Tensor] = []
        self._tables: list[tuple[list[torch.Tensor], TensorTable]] = []

    @torch.no_grad()
    def honour(self, weights: Sequence[torch.Tensor], masters: Sequence[torch.Tensor]) -> None:
        """``master = honoured(master, weight)`` for each pair."""
        same = len(weights) == len(self._weights) and all(map(is_, weights, self._weights))
        if not (same and all(map(is_, masters, self._masters)) and self._renew()):
            self._weights, self._masters = list(weights), list(masters)
            self._tables = list(map(self._table, group_rows(self._weights)))
        for _, table in self._tables:
            launch(table, honour_kernel, {})

    def _table(self, rows: list[int]) -> tuple[list[torch.Tensor], TensorTable]:
        weights, masters = [self._weights[i] for i in rows], [self._masters[i] for i in rows]
        storage = plain(weights[0].dtype)
        columns = {"master": (dense(torch.float32), (masters,)), "weight": (storage, (masters, weights))}
        return masters, TensorTable(columns)

    def _renew(self) -> bool:
        """Renew the tables. False if a tensor has moved in memory: ``p.data = x`` moves a weight."""
        return all(table.renew(masters) for masters, table in self._tables)


class StepWrites:
    """Writes of a step to weights instead of masters: an optimizer that keeps its own list of weights makes them.

    A step that has once written to a master does so always, so nothing is asked about that weight any more.
    """

    def __init__(self) -> None:
        self._known: set[int] = set()  # weights whose masters a step has written to, by identity
        self._before: list[_Before] = []
        self._idle = -1  # the first steps that changed no master; one may have changed no version all the same

    def begin(
        self, weights: Sequence[torch.Tensor], masters: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]
    ) -> None:
        """Before a step: note the weights that have gradients and are not known."""
        if not self._known.issuperset(map(id, weights)):
            rows = zip(weights, masters, grads, strict=True)
            unknown = [(w, m) for w, m, grad in rows if grad is not None and id(w) not in self._known]
            self._before = [_Before(w, m, by_value=w.device.type == "cpu" or self._idle >= 0) for w, m in unknown]

    def check(self, optimizer: Any) -> None:
        """After a step of an optimizer whose step is its own: it has to change masters.

        Raises:
            UsageError: if the step wrote to a parameter that has a gradient and not to its master.
        """
        if not self._before or self._idle == _IDLE:
            return
        moved = [each.master_has_moved() for each in self._before]
        for each, has_moved in zip(self._before, moved, strict=True):
            if each.weight._version != each.versions[0] and not has_moved:
                raise UsageError(
                    f"{type(optimizer).__name__}.step wrote to a 16-bit weight, of shape {tuple(each.weight.shape)}, "
                    "and not to its fp32 master, which is in its param_groups while it steps: it keeps a list of the "
                    "weights of its own, and small updates would be lost. Have it go through self.param_groups, or "
                    "train at O1, where the weights are fp32."
                )
        if any(moved) or self._known:  # a step may leave out some weights
            return
        if any(group.get("lr") != 0.0 for group in optimizer.param_groups):
            self._idle += 1
        if self._idle == _IDLE:
            logger.warning(
                "%d steps of %s had gradients and changed no fp32 master. If it steps weights by a list or a copy of "
                "its own, have it go through self.param_groups, where the masters are while it steps.",
                _IDLE,
                type(optimizer).__name__,
            )

    @torch.no_grad()
    def end(self) -> None:
        """After a step: copy what it wrote to weights into their masters, where it left these as they were."""
        before, self._before = self._before, []
        for each in before:
            if each.master_has_moved():
                self._known.add(id(each.weight))
            elif each.weight_has_moved():
                each.master.copy_(honoured(each.master, each.weight))


class _Before:
    """The state of a weight and its master before a step.

    Versions tell what a step has written to, but a write through ``.data`` changes none, nor do the fused and foreach
    steps of torch. Values tell it always. On another device than a CPU a look at them waits for the device.
    """

    def __init__(self, weight: torch.Tensor, master: torch.Tensor, *, by_value: bool) -> None:
        self.weight, self.master = weight, master
        self.versions = weight._version, master._version
        self._values: tuple[torch.Tensor, torch.Tensor] | None = None
        if by_value:
            self._values = local(weight.detach()).clone(), local(master.detach()).clone()

    def master_has_moved(self) -> bool:
        """Whether the step has written to the master."""
        if self.master._version != self.versions[1]:
            return True
        return self._values is not None and not _same(local(self.master.detach()), self._values[1], torch.int32)

    def weight_has_moved(self) -> bool:
        """Whether the step has written to the weight."""
        if self._values is None:
            return self.weight._version != self.versions[0]
        return not _same(local(self.weight.detach()), self._values[0], torch.int16)


def _same(a: torch.Tensor, b: torch.Tensor, bits: torch.dtype) -> bool:
    return torch.equal(a.view(bits), b.view(bits))
