"""``examples/fp16_fsdp2/``: it learns, ranks skip together, and a run that is resumed continues bit for bit."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as checkpoint

from halfstep.core.hardware import cpu_units

SCRIPT = Path(__file__).parents[2] / "examples/fp16_fsdp2/train.py"


def run(rank: int, folder: str, arguments: list[str]) -> dict[str, Any]:
    history: dict[str, Any] = runpy.run_path(str(SCRIPT))["main"](["--folder", folder, *arguments])
    return history


def saved(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a sharded checkpoint."""
    reader = checkpoint.FileSystemReader(folder)
    known = reader.read_metadata().state_dict_metadata
    sizes = {name: entry.size for name, entry in known.items() if hasattr(entry, "size")}
    state: dict[str, Any] = {name: torch.zeros(size) for name, size in sizes.items() if name.startswith("model.")}
    checkpoint.load(state, storage_reader=reader, no_dist=True)
    return state


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_resumed_run_continues_bit_for_bit(ranks: Any, tmp_path: Path) -> None:
    options = ["--width", "16", "--length", "4", "--steps", "4", "--save-every", "2", "--scale", str(2.0**40)]
    whole, other = ranks.run(run, str(tmp_path / "whole"), options, limit=240.0)
    assert whole == other
    assert whole["scale"][0] < 2.0**40  # the first steps overflowed, and were skipped

    shutil.copytree(tmp_path / "whole" / "2", tmp_path / "resumed" / "2")
    (tmp_path / "resumed" / "3").mkdir()  # a checkpoint that was not finished
    resumed, _ = ranks.run(run, str(tmp_path / "resumed"), options, limit=240.0)
    assert resumed == {name: values[2:] for name, values in whole.items()}
    mine, expected = saved(tmp_path / "resumed" / "4"), saved(tmp_path / "whole" / "4")
    assert len(expected) > 10
    for name, value in expected.items():
        torch.testing.assert_close(mine[name], value, rtol=0, atol=0)


def test_it_learns_and_rounds_less_than_bfloat16(ranks: Any, tmp_path: Path) -> None:
    history = {}
    for dtype in ("float16", "bfloat16"):
        options = ["--steps", "10", "--lr", "2e-3", "--batch-size", "32", "--dtype", dtype]
        history[dtype], _ = ranks.run(run, str(tmp_path / dtype), options, limit=240.0)
        assert history[dtype]["reward"][-1] > 2 * history[dtype]["reward"][0]
    mismatch = {dtype: sum(found["mismatch"]) for dtype, found in history.items()}
    # Without 16-bit units both are summed in fp32 and rounded once, whatever the shapes: then there is hardly any.
    assert mismatch["float16"] < max(mismatch["bfloat16"] / 3, 1e-4), mismatch
    assert mismatch["bfloat16"] > 1e-3 or not cpu_units(torch.bfloat16), mismatch
