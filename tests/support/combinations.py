"""Fewer cases of a test with several parameters: every two values meet in one of them, but not every three.

What a case finds nearly always needs one value of a parameter, or two of two parameters. Five parameters with four
values each make 1,024 cases, and about 20 of them have every pair. ``pytest --combinations all`` runs them all.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations

import pytest

__all__ = ["STRENGTHS", "chosen", "covering"]

STRENGTHS = {"each": 1, "pairs": 2, "all": 0}
"""By the name of the option: how many values meet in some case; 0 for all."""


def covering(rows: Sequence[tuple[str, ...]], strength: int) -> list[int]:
    """Some of the rows in which all those values meet that meet in a row at all, ``strength`` columns at a time.

    The next one is always a row with most new meetings, so they are few, if not the fewest.

    Returns:
        Their places, in order.
    """
    columns = range(len(rows[0]))
    meetings = [
        {(places, tuple(row[i] for i in places)) for places in combinations(columns, min(strength, len(columns)))}
        for row in rows
    ]
    missing = set[object]().union(*meetings)
    queue, taken = [(-len(each), i) for i, each in enumerate(meetings)], []
    heapq.heapify(queue)
    while missing:
        promised, i = heapq.heappop(queue)
        new = len(meetings[i] & missing)
        if new == -promised:
            taken.append(i)
            missing -= meetings[i]
        elif new:
            heapq.heappush(queue, (-new, i))
    return sorted(taken)


def chosen(items: Iterable[pytest.Item], strength: int) -> set[pytest.Item]:
    """The cases of each test to run, among those that were collected.

    Cases with other marks, such as those that need a GPU, are chosen apart: they may be skipped. A test whose cases
    skip by themselves, or whose parameters go together by threes, is marked ``every_combination``. Of one that is
    marked ``costly`` each value is in one case, also where the others have every two.
    """
    alike: dict[tuple[str, frozenset[str], int], list[tuple[pytest.Item, tuple[str, ...]]]] = defaultdict(list)
    kept = set[pytest.Item]()
    for item in items:
        values = tuple(getattr(getattr(item, "callspec", None), "_idlist", ()))  # one of each ``parametrize``
        marks = frozenset(mark.name for mark in item.iter_markers())
        together = min(strength, 1) if "costly" in marks else strength
        if not together or len(values) <= together or "every_combination" in marks:
            kept.add(item)
        else:
            alike[item.nodeid.partition("[")[0], marks, together].append((item, values))
    for (*_, together), cases in alike.items():
        kept.update(cases[i][0] for i in covering([values for _, values in cases], together))
    return kept
