"""A run that is killed and started again by torchrun goes on bit for bit, wherever it was killed."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from halfstep import amp
from halfstep.core.files import save_whole
from halfstep.parallel import save_checkpoint
from tests.support.worlds import advance, assert_equal

pytestmark = pytest.mark.exhaustive  # each test starts torchrun, several times

TRAIN = Path(__file__).resolve().parents[2] / "examples/distributed/train.py"
SMALL = ["--device", "cpu", "--steps", "8", "--save-every", "2", "--width", "16", "--length", "16", "--batch-size", "4"]
SMALL += ["--characters", "20000", "--layers", "1", "--dtype", "float16"]

# Runs the example and kills one process of it, in another place each time: rank 0 while it writes, rank 0 just before
# it renames, rank 1 between two checkpoints. Then it lets it run.
KILLER = """
import os, runpy, signal, sys
from pathlib import Path
import torch
import halfstep.core.files as files
from halfstep import amp

rank = int(os.environ["RANK"])
kills = Path(os.environ["KILLS"])
place = len(list(kills.iterdir()))
passes = 0

def kill():
    (kills / str(place)).touch()
    os.kill(os.getpid(), signal.SIGKILL)

def saving(state, file, own=torch.save):
    if place == 0 and state["step"] == 4:
        file.write(b"half a checkpoint")
        file.flush()
        kill()
    own(state, file)

def replacing(a, b, own=os.replace):
    if place == 1:
        kill()
    own(a, b)

def scaling(*args, own=amp.scale_loss, **kwargs):
    global passes
    passes += 1
    if place == 2 and passes == 6:
        kill()
    return own(*args, **kwargs)

if rank == 0:
    files.torch.save, files.os.replace = saving, replacing
else:
    amp.scale_loss = scaling
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def torchrun(arguments: list[str], **environment: str) -> str:
    """What it printed. Whatever it started is gone when this returns."""
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", *arguments],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    return output


def train_to_the_end(script: list[str], checkpoint: Path, **environment: str) -> list[str]:
    """Start it until the checkpoint is the last one: gloo's processes sometimes fail or hang by themselves."""
    outputs = []
    for _ in range(8):
        outputs.append(torchrun([*script, *SMALL, "--checkpoint", str(checkpoint)], **environment))
        if checkpoint.exists() and torch.load(checkpoint, weights_only=True)["step"] == 8:
            return outputs
    raise AssertionError("\n".join(outputs))


def assert_same(a: Any, b: Any, where: str = "") -> None:
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (list, tuple)):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{i}]")
    else:
        assert a == b, where


@pytest.mark.timeout(900)  # it starts five pairs of processes
def test_killed_three_times_and_resumed(tmp_path: Path) -> None:
    killer, kills = tmp_path / "killer.py", tmp_path / "kills"
    killer.write_text(KILLER)
    kills.mkdir()
    train_to_the_end([str(TRAIN)], tmp_path / "whole.pt")
    outputs = train_to_the_end([str(killer), str(TRAIN)], tmp_path / "killed.pt", KILLS=str(kills))
    assert len(list(kills.iterdir())) == 3, outputs
    # Killed while the checkpoint of step 4 was written, then before it was in place: that of step 2 was still there.
    assert sum("resumed at step 2" in output for output in outputs) >= 2, outputs
    expected, found = (torch.load(tmp_path / name, weights_only=True) for name in ("whole.pt", "killed.pt"))
    assert_same(found, expected)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adagrad", "RMSprop", "Adamax", "NAdam"])
def test_what_torch_distributed_checkpoint_loads_in_place_arrives(name: str, level: str, tmp_path: Path) -> None:
    """It loads into the tensors of ``state_dict()``, which must not be those that ``set_state_dict`` then compares."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def begun() -> tuple[Any, Any, dict[str, Any]]:
        torch.manual_seed(0)
        model: Any = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01)
        dtype = None if level == "O0" else torch.bfloat16
        amp.initialize(model, optimizer, opt_level=level, dtype=dtype, verbosity=0)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        return model, optimizer, {"model": model_state, "optimizer": optimizer_state}

    def steps(model: Any, optimizer: Any, first: int, last: int) -> list[torch.Tensor]:
        for i in range(first, last):
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(i))
            advance(model(x).float().square().mean(), optimizer)
        return [p.detach().clone() for p in amp.master_params(optimizer)]

    model, optimizer, _ = begun()
    steps(model, optimizer, 0, 2)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path, no_dist=True)
    expected = steps(model, optimizer, 2, 4)
    model, optimizer, state = begun()
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert_equal(steps(model, optimizer, 2, 4), expected)


def test_the_previous_file_stays_until_the_new_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "state.pt"
    save_checkpoint({"step": 1}, path)  # one process needs no process group

    def failing(state: Any, file: Any) -> None:
        file.write(b"half")
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", failing)
        with pytest.raises(OSError, match="No space left"):
            save_whole({"step": 2}, path)
    assert torch.load(path, weights_only=True) == {"step": 1}
    save_whole({"step": 3}, path)
    assert torch.load(path, weights_only=True) == {"step": 3}
    assert [p.name for p in path.parent.iterdir()] == ["state.pt"]


def test_the_example_learns_on_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main = runpy.run_path(str(TRAIN))["main"]
    monkeypatch.chdir(tmp_path)
    arguments = ["--device", "cpu", "--characters", "20000", "--length", "32", "--width", "32", "--save-every", "20"]
    assert main([*arguments, "--steps", "40", "--lr", "0.005"]) < 3.6  # ln 128 = 4.85 before it learned anything
