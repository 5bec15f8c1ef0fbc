"""``examples/scale_out/``: however a model is cut, its losses are those of one process."""

from __future__ import annotations

import runpy
import warnings
from pathlib import Path
from typing import Any

import pytest

from halfstep import amp

pytestmark = pytest.mark.exhaustive  # it starts processes

SCRIPT = Path(__file__).parents[2] / "examples/scale_out/train.py"
SHORT = ["--steps", "12", "--depth", "1", "--length", "8"]


def losses(rank: int, *arguments: str) -> list[float]:
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")  # torch, of a linear layer
    try:
        found: list[float] = runpy.run_path(str(SCRIPT))["main"]([*SHORT, *arguments])
        return found
    finally:
        amp.deactivate()


@pytest.mark.costly
@pytest.mark.parametrize(
    ("parallel", "processes"),
    [("ddp", "ranks"), ("fsdp2", "ranks"), ("tp", "ranks"), ("hsdp", "four_ranks"), ("fsdp2+tp", "four_ranks")],
)
@pytest.mark.parametrize(("level", "dtype"), [("O1", "bfloat16"), ("O2", "bfloat16"), ("O2", "float16")])
def test_losses_are_those_of_one_process(
    parallel: str, processes: str, level: str, dtype: str, request: pytest.FixtureRequest
) -> None:
    options = ["--opt-level", level, "--dtype", dtype]
    alone = losses(0, *options)
    assert alone[-1] < 0.8 * alone[0]
    ranks: Any = request.getfixturevalue(processes)
    first, *others = ranks.run(losses, *options, "--parallel", parallel)
    assert all(other == first for other in others)
    assert first == pytest.approx(alone, rel=0.01)
