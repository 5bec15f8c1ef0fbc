"""A sharded job of torchrun goes on from its last whole checkpoint when a rank is killed, to the same bits."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from tests.support.elastic import disturbed, train
from tests.support.processes import Ranks


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
@pytest.mark.timeout(1800)
def test_killed_ranks_of_a_sharded_job(ranks: Ranks, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    kills = 10 if pytestconfig.getoption("combinations") == "all" else 1
    (tmp_path / "calm").mkdir()
    expected, _ = ranks.run(train, tmp_path / "calm", 40 * kills)
    found, resumed = disturbed(tmp_path / "killed", 40 * kills, kills, random.Random(0))
    assert found == expected
    assert len(resumed) == kills
    assert max(resumed) > 0  # not all of them before the first checkpoint
