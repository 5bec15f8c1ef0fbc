"""Checkpoints are whole, with the rights that they had, and in the place that a link names."""

from __future__ import annotations

import functools
import io
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from halfstep import Model, amp, optimizers
from halfstep.core.files import save_whole, write_whole
from halfstep.fp16_utils import FP16_Optimizer
from halfstep.parallel import save_checkpoint
from tests.support.worlds import BF16, scaled_step, start_amp

SAVES: list[Callable[[Any, Path], None]] = [save_whole, save_checkpoint]
saves = pytest.mark.parametrize("save", SAVES)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


class Unpicklable:
    def __reduce__(self) -> Any:
        raise RuntimeError("no")


@saves
@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_link_at_the_temporary_name_is_not_followed(save: Any, link: Any, tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "x.pt"
    victim.write_text("precious")
    link(victim, tmp_path / "x.pt.tmp")
    save({"a": 1}, path)
    assert victim.read_text() == "precious"
    assert not path.is_symlink()
    assert torch.load(path, weights_only=True) == {"a": 1}


@saves
@pytest.mark.parametrize("bits", [0o600, 0o640, 0o664, 0o400])
def test_a_file_keeps_its_mode(save: Any, bits: int, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({}, path)
    path.chmod(bits)
    save({"a": 1}, path)
    assert mode(path) == bits
    assert torch.load(path, weights_only=True) == {"a": 1}


@saves
@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_a_new_file_has_the_mode_of_any_new_file(save: Any, umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        save({}, tmp_path / "x.pt")
    finally:
        os.umask(before)
    assert mode(tmp_path / "x.pt") == 0o666 & ~umask


def test_the_unfinished_file_is_never_open_to_more_people(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, seen = tmp_path / "x.pt", []
    torch.save({}, path)
    path.chmod(0o600)
    own = torch.save
    monkeypatch.setattr(torch, "save", lambda state, file: (seen.append(mode(tmp_path / "x.pt.tmp")), own(state, file)))
    save_whole({"a": 1}, path)
    assert seen == [0o600]


@saves
@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_a_link_and_its_target_is_replaced(save: Any, there: bool, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    target, path = tmp_path / "disk" / "real.pt", tmp_path / "latest.pt"
    if there:
        torch.save({}, target)
    path.symlink_to(target)
    save({"a": 1}, path)
    assert path.is_symlink()
    assert not target.is_symlink()
    assert torch.load(target, weights_only=True) == {"a": 1}


@saves
def test_an_error_leaves_the_previous_file_and_nothing_else(save: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    save({"a": 1}, path)
    with pytest.raises(RuntimeError, match="no"):
        save({"a": Unpicklable()}, path)
    assert [each.name for each in tmp_path.iterdir()] == ["x.pt"]
    assert torch.load(path, weights_only=True) == {"a": 1}


def test_a_text_that_cannot_be_encoded_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(UnicodeEncodeError):
        write_whole(tmp_path / "text", "\udc00")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "x.pt.tmp").write_text("half")
    save_whole({"a": 1}, tmp_path / "x.pt")
    assert [each.name for each in tmp_path.iterdir()] == ["x.pt"]


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    path, read = tmp_path / "pipe", []
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: read.append(path.read_bytes()), daemon=True)
    reader.start()
    save_whole({"a": 1}, path)
    assert path.is_fifo()
    reader.join(10)
    assert torch.load(io.BytesIO(read[0]), weights_only=True) == {"a": 1}


# ---- no checkpoint needs unpickling


def trained(level: str, made: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model, optimizer = start_amp(
        torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)),
        made,
        level,
        dtype=BF16,
        loss_scale="dynamic",
    )
    scaled_step(model(torch.randn(3, 4)).float().square().mean(), optimizer)
    return model, optimizer


def make(kind: Any, params: Any, **options: Any) -> Any:
    return kind(params, lr=0.01, **options)


def larc(params: Any) -> Any:
    return optimizers.LARC(torch.optim.SGD(params, lr=0.01))


TORCHS, FUSED = (
    ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop"),
    ("FusedAdam", "FusedSGD", "FusedAdagrad", "FusedNovoGrad"),
)
MAKES: dict[str, Any] = {
    **{name: functools.partial(make, getattr(torch.optim, name)) for name in TORCHS},
    **{name: functools.partial(make, getattr(optimizers, name)) for name in FUSED},
    "FusedLAMB": functools.partial(make, optimizers.FusedLAMB, weight_decay=0.0),
    "LARC": larc,
}


def read(path: Path) -> Any:
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("name", MAKES)
def test_states_of_initialize_need_no_unpickling(name: str, level: str, tmp_path: Path) -> None:
    model, optimizer = trained(level, MAKES[name])
    saved = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "amp": amp.state_dict(),
        "scaler": amp.GradScaler().state_dict(),
    }
    save_checkpoint(saved, tmp_path / "x.pt")
    found = read(tmp_path / "x.pt")
    amp.load_state_dict(found["amp"])
    optimizer.load_state_dict(found["optimizer"])
    model.load_state_dict(found["model"])
    assert found.keys() == saved.keys()
    assert found["amp"] == saved["amp"]


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_files_of_model_need_no_unpickling(level: str, tmp_path: Path) -> None:
    network = torch.nn.Linear(4, 2)
    model = Model(network)
    model.prepare(
        torch.optim.AdamW(network.parameters(), lr=0.01), torch.nn.CrossEntropyLoss(), amp_configs={"level": level}
    )
    model.train_batch(torch.randn(3, 4), torch.tensor([0, 1, 0]))
    model.save(tmp_path / "model")
    files = sorted(each.name for each in tmp_path.iterdir())
    assert files
    for file in files:
        assert read(tmp_path / file)


def test_states_of_fp16_optimizer_need_no_unpickling(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 2).half()
    optimizer = FP16_Optimizer(torch.optim.Adam(model.parameters()), dynamic_loss_scale=True, verbose=False)
    optimizer.backward(model(torch.randn(3, 4).half()).float().sum())
    optimizer.step()
    save_checkpoint(optimizer.state_dict(), tmp_path / "x.pt")
    optimizer.load_state_dict(read(tmp_path / "x.pt"))
    assert optimizer.loss_scale > 1.0
