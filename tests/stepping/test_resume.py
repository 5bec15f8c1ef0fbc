"""A training that is started again continues bit for bit; ``test_killed.py`` has kills at random moments."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from halfstep import amp
from halfstep.core.files import save_whole
from halfstep.parallel import save_checkpoint
from tests.support.killed import digest
from tests.support.processes import Ranks
from tests.support.worlds import advance, assert_equal

pytestmark = pytest.mark.exhaustive

TRAIN = Path(__file__).resolve().parents[2] / "examples/distributed/train.py"
SMALL = ["--device", "cpu", "--save-every", "2", "--width", "16", "--length", "16", "--batch-size", "4"]
SMALL += ["--characters", "20000", "--layers", "1", "--dtype", "float16"]


def test_the_example_goes_on_from_its_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main, found = runpy.run_path(str(TRAIN))["main"], []
    for name, starts in {"whole.pt": [8], "resumed.pt": [4, 8]}.items():
        for steps in starts:
            main([*SMALL, "--steps", str(steps), "--checkpoint", str(tmp_path / name)])
        found.append(torch.load(tmp_path / name, weights_only=True))
    assert capsys.readouterr().out.count("resumed at step 4") == 1
    assert digest(found[0]) == digest(found[1])


def test_processes_of_the_example_meet_at_a_file_of_their_own_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    example = runpy.run_path(str(TRAIN))
    example["join"](example["parse"]([*SMALL, "--checkpoint", str(tmp_path / "c.pt")]), 1, 0)
    assert (tmp_path / "c.pt.job-2").exists()
    dist.destroy_process_group()


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


def on_a_rank(rank: int, start: int, arguments: list[str]) -> str:
    """What a rank of the example prints in one of several starts. torchrun sets these variables."""
    dist.destroy_process_group()
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", TORCHELASTIC_RUN_ID="job", TORCHELASTIC_RESTART_COUNT=str(start))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(TRAIN))["main"](arguments)
    return printed.getvalue()


def test_the_example_goes_on_with_two_ranks(tmp_path: Path) -> None:
    printed = []
    for start, steps in enumerate(("4", "8")):
        with contextlib.closing(Ranks(2)) as ranks:
            arguments = [*SMALL, "--checkpoint", str(tmp_path / "state.pt"), "--steps", steps]
            printed.append("".join(ranks.run(on_a_rank, start, arguments)))
    assert ["resumed at step 4" in each for each in printed] == [False, True]
    assert torch.load(tmp_path / "state.pt", weights_only=True)["step"] == 8
