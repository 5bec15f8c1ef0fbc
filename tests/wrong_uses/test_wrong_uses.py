"""Every wrong use is refused at once, in words that say what was given, what is allowed and what to do.

Nothing has changed afterwards: neither weights, gradients, hooks, groups and state nor scales and the casts of the
process. A row is one line in the tables of ``rows_amp``, ``rows_steps`` and ``rows_faces``.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from halfstep.core.errors import HalfstepError

from . import rows_amp, rows_faces, rows_steps
from .worlds import Wrong, same, snapshot

ROWS = [*rows_amp.ROWS, *rows_steps.ROWS, *rows_faces.ROWS]


@pytest.mark.parametrize("row", ROWS, ids=[row.name.replace("::", ":") for row in ROWS])
def test_a_wrong_use_is_refused_in_words_that_help(row: Wrong, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    world = row.setup()
    before = snapshot(world)
    with pytest.raises(row.error) as raised:
        row.use(world)
    message = str(raised.value)
    assert isinstance(raised.value, HalfstepError)
    assert [words for words in row.words if words not in message] == [], message
    after = snapshot(world)
    assert [name for name in before if not same(before[name], after[name])] == []
    if hasattr(world, "handle"):
        world.handle._deactivate()  # it has a hook on every module


def test_the_table_is_long_and_has_no_row_twice() -> None:
    assert len(ROWS) >= 200
    assert [name for name, count in Counter(row.name for row in ROWS).items() if count > 1] == []
