"""A run that is killed with SIGKILL at a random moment, also while it saves, goes on from its checkpoint to the bit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.python import python

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork and no SIGKILL"),
]


@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_at_random_moments(ranks: int, tmp_path: Path) -> None:
    done = python("-m", "tests.support.killed", str(ranks), "12", "0", str(tmp_path), cwd=ROOT, timeout=250.0)
    assert done.returncode == 0, done.stderr
    kills, loaded = done.stdout.split(" kills, ")[0], int(done.stdout.split(" kills, ")[1].split()[0])
    assert kills == "12"
    assert loaded >= 6  # the others were killed before there was one


def test_where_one_rank_dies_the_others_end_with_an_error(tmp_path: Path) -> None:
    done = python("-m", "tests.support.dying", "4", "0", str(tmp_path), cwd=ROOT, timeout=250.0)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("4 deaths")
