"""``examples/scale_out/``: however a model is cut, its losses are those of one process."""

from __future__ import annotations

import functools
import runpy
import warnings
from pathlib import Path

import pytest

from halfstep import amp
from tests.support.processes import ranks_of

pytestmark = pytest.mark.exhaustive  # it starts processes

SCRIPT = Path(__file__).parents[2] / "examples/scale_out/train.py"
SHORT = ["--steps", "8", "--depth", "1", "--length", "8"]


def losses(rank: int, *arguments: str) -> list[float]:
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")  # torch, of a linear layer
    try:
        found: list[float] = runpy.run_path(str(SCRIPT))["main"]([*SHORT, *arguments])
        return found
    finally:
        amp.deactivate()


@functools.cache
def losses_alone(*arguments: str) -> list[float]:
    return losses(0, *arguments)


@pytest.mark.costly
@pytest.mark.parametrize(("parallel", "world"), [("ddp", 2), ("fsdp2", 2), ("tp", 2), ("hsdp", 4), ("fsdp2+tp", 4)])
@pytest.mark.parametrize(("level", "dtype"), [("O1", "bfloat16"), ("O2", "bfloat16"), ("O2", "float16")])
def test_losses_are_those_of_one_process(parallel: str, world: int, level: str, dtype: str) -> None:
    options = ["--opt-level", level, "--dtype", dtype]
    alone = losses_alone(*options)
    assert alone[-1] < 0.8 * alone[0]
    first, *others = ranks_of(world).run(losses, *options, "--parallel", parallel)
    assert all(other == first for other in others)
    assert first == pytest.approx(alone, rel=0.01)
