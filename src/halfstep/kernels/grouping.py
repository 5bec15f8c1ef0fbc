"""Which rows of tensors go together in one multi-tensor call: worked out once for a list of tensors, then kept."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from .shards import Domain, domain_of, is_sharded, locals_of

__all__ = ["Plan", "PlanCache"]


class Plan:
    """Aligned lists of tensors, split into groups that share device, dtype and processes column by column.

    Only positions are kept, never a tensor, so that a plan made for one step serves the next, whose gradients
    are new tensors of the same kind.

    Args:
        columns: lists of equal length; row i is ``(columns[0][i], columns[1][i], ...)``.

    Attributes:
        domains: for each group, the processes over which its tensors are cut.
    """

    __slots__ = ("_groups", "_sharded", "domains")

    def __init__(self, *columns: Sequence[torch.Tensor]) -> None:
        groups: dict[Hashable, list[int]] = {}
        for i, row in enumerate(zip(*columns, strict=True)):
            groups.setdefault(tuple((t.device, t.dtype, domain_of(t)) for t in row), []).append(i)
        self._groups = list(groups.values())
        first = columns[0] if columns else []
        self.domains: list[Domain] = [domain_of(first[rows[0]]) for rows in self._groups]
        self._sharded = any(is_sharded(tensor) for column in columns for tensor in column)

    @property
    def rows(self) -> list[list[int]]:
        """The positions of each group's rows."""
        return self._groups

    def split(self, *columns: list[torch.Tensor]) -> list[tuple[list[torch.Tensor], ...]]:
        """The groups of these lists, which must be of the kind the plan was made for.

        Returns:
            One tuple of lists for each group, the lists in the order of ``columns``; of sharded tensors the parts that
            lie here.
        """
        if self._sharded:
            columns = tuple(map(locals_of, columns))
        if len(self._groups) == 1:
            return [columns]
        return [tuple([column[i] for i in rows] for column in columns) for rows in self._groups]


class PlanCache:
    """The plans of a set of long-lived tensors (parameters, masters), found by their identity.

    The tensors that make the key are kept alive by the entry, so that an identity is never one of a later tensor.
    A cache holds one plan per ``slot``: when other tensors take part (a parameter had no gradient this time, a
    group was added), the plan of the slot is made anew.
    """

    def __init__(self) -> None:
        self._plans: dict[Hashable, tuple[tuple[int, ...], Plan, Sequence[torch.Tensor]]] = {}

    def get(self, slot: Hashable, owners: Sequence[torch.Tensor], *columns: Sequence[torch.Tensor]) -> Plan:
        """The plan for ``columns``, whose rows belong to ``owners``."""
        key = tuple(map(id, owners))
        entry = self._plans.get(slot)
        if entry is None or entry[0] != key:
            entry = self._plans[slot] = (key, Plan(*columns), owners)
        return entry[1]
