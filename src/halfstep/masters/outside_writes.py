"""Writes to 16-bit weights that have not reached their plain masters: between two steps, or by a step."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch

from ..kernels.expr import elementwise_kernel
from ..kernels.grouping import group_rows
from ..kernels.launch import launch
from ..kernels.shards import local
from ..kernels.storage import dense, plain
from ..kernels.tensor_table import TensorTable

__all__ = ["OutsideWrites", "StepWrites"]


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

    def begin(
        self, weights: Sequence[torch.Tensor], masters: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]
    ) -> None:
        """Before a step: note the weights that have gradients and are not known."""
        if not self._known.issuperset(map(id, weights)):
            rows = zip(weights, masters, grads, strict=True)
            self._before = [_Before(w, m) for w, m, grad in rows if grad is not None and id(w) not in self._known]

    def end(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """After it: the weights that it wrote to and whose masters it left as they were, with these."""
        before, self._before = self._before, []
        self._known.update(id(each.weight) for each in before if each.master_has_moved())
        return [(each.weight, each.master) for each in before if each.only_weight_has_moved()]


class _Before:
    """The state of a weight and its master before a step.

    On a CPU their values tell which of them the step has written to. On another device a look at values would wait
    for the device. There versions tell it, but the fused and foreach steps of torch do not count them up.
    """

    def __init__(self, weight: torch.Tensor, master: torch.Tensor) -> None:
        self.weight, self.master = weight, master
        self._versions = weight._version, master._version
        self._values: tuple[torch.Tensor, torch.Tensor] | None = None
        if weight.device.type == "cpu":
            self._values = local(weight.detach()).clone(), local(master.detach()).clone()

    def master_has_moved(self) -> bool:
        """Whether the step has written to the master."""
        if self.master._version != self._versions[1]:
            return True
        return self._values is not None and not _same(local(self.master.detach()), self._values[1], torch.int32)

    def only_weight_has_moved(self) -> bool:
        """Whether the step has written to the weight, and not to the master."""
        if self._values is None:
            moved = self.weight._version != self._versions[0]
        else:
            moved = not _same(local(self.weight.detach()), self._values[0], torch.int16)
        return moved and not self.master_has_moved()


def _same(a: torch.Tensor, b: torch.Tensor, bits: torch.dtype) -> bool:
    return torch.equal(a.view(bits), b.view(bits))
