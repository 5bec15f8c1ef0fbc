"""Every example runs, in a short version, and learns."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script as a module, with its own folder on the path as when it is run."""
    path = EXAMPLES / f"{name}.py"
    monkeypatch.syspath_prepend(str(path.parent))
    spec = importlib.util.spec_from_file_location(name.replace("/", "_"), path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def test_every_example_is_tested_and_has_a_readme() -> None:
    folders = {path.parent.name for path in EXAMPLES.glob("*/*.py")}
    tests = "".join(path.read_text() for path in Path(__file__).parents[1].rglob("test_*.py"))
    for folder in folders:
        assert (EXAMPLES / folder / "README.md").exists()
        assert f"{folder}/" in tests
        assert f"]({folder})" in (EXAMPLES / "README.md").read_text()


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["with_amp", "with_fp16_optimizer", "with_closure", "by_hand"])
def test_simple(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, last = load(f"simple/{name}", monkeypatch).main(["--device", "cpu", "--dtype", dtype, "--steps", "100"])
    assert last < first / 1000


@pytest.fixture
def images(somewhere: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    load("imagenet/digits", monkeypatch).main([str(somewhere / "images"), "--limit", "600"])
    return str(somewhere / "images")


@pytest.mark.exhaustive
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_imagenet_and_resuming(level: str, images: str, somewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main = load("imagenet/main", monkeypatch).main
    arguments = [images, "--size", "8", "--device", "cpu", "--opt-level", level, "--batch-size", "32"]
    main([*arguments, "--epochs", "1"])
    found = main([*arguments, "--epochs", "3", "--resume", "checkpoint.pt"])
    assert found > 0.5
    state = torch.load(somewhere / "checkpoint.pt", weights_only=True)
    assert state["epoch"] == 3
    assert {value.dtype for value in state["model"].values()} == {torch.float32, torch.int64}


@pytest.mark.exhaustive
def test_imagenet_on_two_processes(images: str) -> None:
    """The one test in which torchrun itself starts a training; ranks of other tests are forked."""
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    script = [str(EXAMPLES / "imagenet/main.py"), images, "--size", "8", "--device", "cpu"]
    done = subprocess.run(
        [*run, *script, "--opt-level", "O2", "--sync-bn", "--epochs", "1", "--batch-size", "16"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    # torch's gloo processes sometimes die after their work is done; what they wrote says whether it was.
    assert "epoch 1: loss" in done.stdout, done.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_dcgan(
    level: str, somewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--device", "cpu", "--opt-level", level, "--epochs", "1", "--limit", "512", "--width", "16"]
    found = load("dcgan/main", monkeypatch).main(arguments)
    assert found["discriminator"] < 1.386  # two coins' worth of not knowing
    assert (somewhere / "samples.png").stat().st_size > 0
    assert "scales [1.0, 1.0, 1.0], 0 steps skipped" in capsys.readouterr().out


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [["--tied"], ["--model", "GRU", "--static-loss-scale", "128"]])
def test_word_language_model(options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    small = ["--device", "cpu", "--characters", "60000", "--vocabulary", "500", "--width", "64", "--epochs", "1"]
    perplexity = load("word_language_model/main", monkeypatch).main([*small, "--batch-size", "8", *options])
    assert perplexity < 200  # 500 before it learned anything
