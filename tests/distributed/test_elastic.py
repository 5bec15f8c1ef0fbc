"""A sharded job goes on from its last whole checkpoint when a rank is killed, to the same bits."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.elastic import compare


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
@pytest.mark.timeout(1800)
def test_killed_ranks_of_a_sharded_job(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    resumed = compare(10 if pytestconfig.getoption("combinations") == "all" else 1, 0, tmp_path)
    assert max(resumed) > 0  # not all of them before the first checkpoint
