"""The placement of casts as a minimum cut between 16-bit values and fp32 values.

Operations that only move data give the same numbers in either dtype, so their dtype is free to choose. Each value is
cast at most once, however many ops read it; so the number of casts is the size of a cut (Boykov and Kolmogorov, PAMI
2004).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence

__all__ = ["fewest_casts"]

_HALF, _FLOAT = "half", "float"
_UNBOUNDED = 1 << 30


def fewest_casts(
    free: Iterable[Hashable], fixed: Mapping[Hashable, str], readers: Mapping[Hashable, Sequence[Hashable | str]]
) -> dict[Hashable, str]:
    """Choose a dtype for each free value so that as few values as possible are needed in both.

    Args:
        free: values that may have either dtype.
        fixed: the values whose dtype is known: "half" or "float".
        readers: for each value its readers: "half" or "float" for an op that reads this dtype, or the free value that
            an op computes from it, whose dtype then decides.

    Returns:
        "half" or "float" for each free value; "float" if both need the same number of casts.
    """
    left: defaultdict[Hashable, dict[Hashable, int]] = defaultdict(dict)

    def connect(a: Hashable, b: Hashable, capacity: int) -> None:
        left[a][b] = capacity
        left[b].setdefault(a, 0)

    place: dict[Hashable, Hashable] = {**fixed, **{value: ("value", value) for value in free}}
    for value, wanted in readers.items():
        connect(place[value], ("narrow", value), 1)  # cut if the value is 16-bit and an op reads fp32
        connect(("widen", value), place[value], 1)  # cut if the value is fp32 and an op reads 16 bits
        for reader in wanted:
            other = reader if reader in (_HALF, _FLOAT) else place[reader]
            connect(("narrow", value), other, _UNBOUNDED)
            connect(other, ("widen", value), _UNBOUNDED)
    while _FLOAT in (came := _reached(left, _HALF)):
        there: Hashable = _FLOAT
        while there != _HALF:
            left[came[there]][there] -= 1
            left[there][came[there]] += 1
            there = came[there]
    return {value: _HALF if place[value] in came else _FLOAT for value in free}


def _reached(left: Mapping[Hashable, Mapping[Hashable, int]], source: Hashable) -> dict[Hashable, Hashable]:
    """Return the nodes that a source reaches by edges with capacity left, each with the node before it.

    Paths with the fewest edges come first (Edmonds and Karp). Each of them has an edge of capacity 1.
    """
    came = {source: source}
    queue = deque([source])
    while queue:
        here = queue.popleft()
        for there, capacity in left.get(here, {}).items():
            if capacity and there not in came:
                came[there] = here
                queue.append(there)
    return came
