"""Which tensors go together in one multi-tensor call: those of one device, one dtype and one way of sharding."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from .shards import FLATTENED, ORDINARY, Domain, domain_of, locals_of

__all__ = ["TensorGroups", "TensorGroupsCache", "group_rows"]


def group_rows(*columns: Sequence[torch.Tensor | None], marks: Sequence[Hashable] = ()) -> list[list[int]]:
    """The positions of rows whose tensors have the same device, dtype and sharding, column by column.

    Args:
        columns: lists of equal length; row i is ``(columns[0][i], columns[1][i], ...)``. None goes with None.
        marks: one for each row, if there are any; rows with the same go together.

    Returns:
        A list of positions for each group. Groups come in the order of their first rows.
    """
    groups: dict[Hashable, list[int]] = {}
    for i, row in enumerate(zip(*columns, strict=True)):
        key = (
            tuple([None if t is None else (t.device, t.dtype, domain_of(t)) for t in row]),
            marks[i] if marks else None,
        )
        groups.setdefault(key, []).append(i)
    return list(groups.values())


class TensorGroups:
    """The groups of aligned lists of tensors; see ``group_rows``.

    Only positions are kept, never a tensor. So the groups of one step serve the next, whose gradients are new tensors
    of the same kind.

    Args:
        columns: lists of equal length.
        owners: the parameters whose gradients or masters these are. FSDP1 cuts them into plain tensors.

    Attributes:
        domains: for each group, the processes over which its tensors are sharded.
        cut: those among them that are not empty, each once.
    """

    __slots__ = ("_rows", "cut", "domains")

    def __init__(self, *columns: Sequence[torch.Tensor], owners: Sequence[torch.Tensor] = ()) -> None:
        self._rows = group_rows(*columns)
        flat = FLATTENED if FLATTENED in map(domain_of, owners) else ()
        self.domains: list[Domain] = [domain_of(columns[0][rows[0]]) or flat for rows in self._rows]
        self.cut: list[Domain] = [domain for domain in dict.fromkeys(self.domains) if domain]

    def split(self, *columns: Sequence[torch.Tensor]) -> list[tuple[list[torch.Tensor], ...]]:
        """The groups of these lists, which must be of the kind that the groups were made for.

        Returns:
            One tuple of lists for each group, the lists in the order of ``columns``. Of sharded tensors they hold the
            local parts.
        """
        if len(self._rows) != 1:
            groups = [tuple([[column[i] for i in rows] for column in columns]) for rows in self._rows]
        else:
            groups = [tuple([column if isinstance(column, list) else list(column) for column in columns])]
        plain = all(ORDINARY.issuperset(map(type, column)) for column in columns)
        return groups if plain else [tuple(map(locals_of, group)) for group in groups]


class TensorGroupsCache:
    """The groups of long-lived tensors (parameters, masters), found by the identity of these.

    An entry keeps its tensors alive, so that their identities cannot become those of later tensors. The cache holds one
    entry for each ``slot``. It is made anew when other tensors take part: a parameter had no gradient this time, or a
    parameter group was added.
    """

    def __init__(self) -> None:
        self._entries: dict[Hashable, tuple[tuple[int, ...], TensorGroups, Sequence[torch.Tensor]]] = {}

    def get(self, slot: Hashable, owners: Sequence[torch.Tensor], *columns: Sequence[torch.Tensor]) -> TensorGroups:
        """The groups of ``columns``, whose rows belong to ``owners``."""
        key = tuple(map(id, owners))
        entry = self._entries.get(slot)
        if entry is None or entry[0] != key:
            entry = self._entries[slot] = (key, TensorGroups(*columns, owners=owners), owners)
        return entry[1]
