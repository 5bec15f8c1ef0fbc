"""The placement of casts as a minimum cut between 16-bit values and fp32 values.

Operations that only move data give the same numbers in either dtype, so their dtype is free to choose. Each value is
cast at most once, however many ops read it; so the number of casts is the size of a cut (Boykov and Kolmogorov, PAMI
2004).
"""

from __future__ import annotations

from collections import deque
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
    network = _Network()
    place: dict[Hashable, Hashable] = {**fixed, **{value: ("value", value) for value in free}}
    for value, wanted in readers.items():
        at = place[value]
        others = {reader if reader in (_HALF, _FLOAT) else place[reader] for reader in wanted}
        network.add(at, ("narrow", value), 1)  # cut if the value is 16-bit and an op reads fp32
        network.add(("widen", value), at, 1)  # cut if the value is fp32 and an op reads 16 bits
        for other in others:
            network.add(("narrow", value), other, _UNBOUNDED)
            network.add(other, ("widen", value), _UNBOUNDED)
    half = network.cut(_HALF, _FLOAT)
    return {value: _HALF if place[value] in half else _FLOAT for value in free}


class _Network:
    """A flow network that computes a minimum cut (Edmonds and Karp)."""

    def __init__(self) -> None:
        self._left: dict[Hashable, dict[Hashable, int]] = {}

    def add(self, a: Hashable, b: Hashable, capacity: int) -> None:
        """Add an edge; the capacities of parallel edges add up."""
        if a != b:
            edges = self._left.setdefault(a, {})
            edges[b] = edges.get(b, 0) + capacity
            self._left.setdefault(b, {}).setdefault(a, 0)

    def cut(self, source: Hashable, sink: Hashable) -> set[Hashable]:
        """Return the source's side of a minimum cut: the nodes that it still reaches when no more flow fits."""
        while True:
            came: dict[Hashable, Hashable] = {source: source}
            queue = deque([source])
            while queue and sink not in came:
                here = queue.popleft()
                for there, left in self._left.get(here, {}).items():
                    if left > 0 and there not in came:
                        came[there] = here
                        queue.append(there)
            if sink not in came:
                return set(came)
            path = [sink]
            while path[-1] != source:
                path.append(came[path[-1]])
            steps = list(zip(path[1:], path, strict=False))
            flow = min(self._left[a][b] for a, b in steps)
            for a, b in steps:
                self._left[a][b] -= flow
                self._left[b][a] += flow
