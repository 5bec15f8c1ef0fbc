"""The benchmarks run, take turns, and tell when there is nothing to check."""

from __future__ import annotations

import gc
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import emulation, gpu_check, harness, walks
from benchmarks.__main__ import BENCHMARKS, main
from benchmarks.harness import Contender, interleave
from tests.support.python import python

CPU = torch.device("cpu")


def test_contenders_take_turns_in_a_rotating_order() -> None:
    calls: list[str] = []
    contenders = [Contender(name, lambda name=name: calls.append(name)) for name in "abc"]
    timings = interleave(contenders, device=CPU, baseline="a", rounds=2, warm_up=1)
    assert "".join(calls) == "abc" + "bca" + "cab"
    assert [len(timing.seconds) for timing in timings] == [2, 2, 2]
    assert timings[0].ratio == 1.0


def test_the_context_around_a_step_is_not_timed() -> None:
    clock = [0.0]

    class Around:
        def __enter__(self) -> None:
            clock[0] += 100.0

        def __exit__(self, *error: object) -> None:
            clock[0] += 100.0

    def take(seconds: float) -> None:
        clock[0] += seconds

    contenders = [Contender("a", lambda: take(1.0), Around), Contender("b", lambda: take(3.0))]
    limits: dict[str, Any] = {"rounds": 4, "max_seconds": 1e9, "warm_up": 0, "clock": lambda: clock[0]}
    timings = interleave(contenders, device=CPU, baseline="a", **limits)
    assert timings[0].seconds == [1.0] * 4
    assert timings[1].ratio == 3.0


@pytest.mark.parametrize(("limits", "rounds"), [({"min_seconds": 50.0}, 50), ({"max_seconds": 5.0}, 6)])
def test_time_limits(limits: dict[str, float], rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(harness.time, "perf_counter", lambda: clock[0])

    def step() -> None:
        clock[0] += 1.0

    (timing,) = interleave([Contender("a", step)], device=CPU, baseline="a", rounds=10, warm_up=0, **limits)
    assert len(timing.seconds) == rounds


@pytest.mark.exhaustive
@pytest.mark.parametrize(("dtype", "optimizer"), [("bfloat16", "sgd"), ("float16", "adam")])
def test_simplenet(dtype: str, optimizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "made" / "s.json"
    flags = ["--device", "cpu", "--width", "32", "--batch", "8", "--steps", "2", "--dtype", dtype]
    flags += ["--optimizer", optimizer, "--json", str(path)]
    assert main(["simplenet", *flags]) == 0
    names = ["fp32", "torch.autocast", "torch.autocast, fused", "pure 16-bit"]
    names += ["halfstep O1", "halfstep O2", "halfstep O3", "halfstep O1, fused"]
    names += ["halfstep O2, fused"]
    record = json.loads(path.read_text())
    assert [timing["name"] for timing in record["timings"]] == names
    assert record["settings"]["dtype"] == dtype
    assert record["machine"]["torch"] == torch.__version__
    assert set(record["settings"]["losses"]) == set(names)
    printed = capsys.readouterr().out
    assert all(name in printed for name in names)


RUNS = {  # what is run, what it prints, and its first contenders
    "host_time --steps 2 --tensors 1": ("1 tensor", ["torch, 1", "torch, clipped, 1", "FusedAdam, 1"]),
    "muon --layers 1 --width 32 --steps 2": ("", ["torch.optim.Muon", "FusedMuon", "FusedMuon, split masters"]),
    "reported --steps 1 --sizes 32 --training-steps 2 --seeds 1": (
        "halfstep O2, 2-byte masters: ",
        ["32, fp32", *(f"32, {dtype} {whose}" for dtype in ("bfloat16", "float16") for whose in ("torch", "halfstep"))],
    ),
    "train_step --models mlp --steps 2": (
        "",
        [f"{name}, mlp" for name in ("torch.autocast, eager", "fp32, eager", "torch.autocast, torch.compile")],
    ),
    "emulation --dtype bfloat16 --no-native --steps 1 --max-seconds 0": (
        "units",
        [f"bfloat16, linear, 256 x 1024 x 1024, {name}" for name in ("fp32", "emulated")],
    ),
    "shapes --steps 1 --max-seconds 0 --table steps": (
        "bfloat16 on cpu",
        [f"steps, width 32, {name}" for name in ("fp32", "O1", "O2")],
    ),
    "fused_step --steps 1 --max-seconds 0 --lists 400x16": ("torch.AdamW at O2", []),
    "memory_speed --parameters 1000 --threads 1 --small 3 --steps 1 --optimizer adam": (
        "of the time of torch's loop",
        [*(f"{name}, 1000, 1" for name in ("copy", "clip", "no clip", "torch")), "torch, 3x16", "clip, 3x16"],
    ),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # Inductor calls it
@pytest.mark.parametrize(
    "line", [pytest.param(line, marks=[pytest.mark.exhaustive] if n else []) for n, line in enumerate(RUNS)]
)
def test_a_benchmark_times_its_contenders(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, threads = tmp_path / "b.json", torch.get_num_threads()
    device = [] if "threads" in line else ["--device", "cpu"]
    assert main([*line.split(), *device, "--json", str(path)]) == 0
    record = json.loads(path.read_text())
    assert [timing["name"] for timing in record["timings"]][: len(RUNS[line][1])] == RUNS[line][1]
    assert RUNS[line][0] in capsys.readouterr().out
    assert record["settings"].get("angle", 0.0) < 0.05  # of Muon's update to torch's
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
    assert torch.get_num_threads() == threads


def test_models_that_torch_cannot_run_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise RuntimeError("could not create a primitive. Run with ONEDNN_VERBOSE=all")

    assert not emulation._is_able(Contender("torch.autocast", fail))
    assert capsys.readouterr().out == "torch.autocast: could not create a primitive\n"


@pytest.mark.parametrize("options", [[], ["--brief"]])
def test_a_walk_is_its_numbers_and_its_calls(
    options: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(walks, "WALKS", {"FusedAdam.step": walks.WALKS["FusedAdam.step"]})
    assert main(["walks", *options]) == 0
    first, *calls = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"FusedAdam.step: \d+ calls in \d+ files, \d+ returns to a room; \d+ lines", first)
    assert any(line.startswith("    optimizers/base.py:step") for line in calls) == (not options)
    assert sys.getprofile() is None
    assert gc.isenabled()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_gpu_check_without_cuda(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["gpu_check", "--report", str(tmp_path / "gpu.html")]) != 0
    said = capsys.readouterr().err
    assert "no CUDA device here, so nothing was checked and no report was written. Run it on a machine with an" in said
    assert f"here torch {torch.__version__} is built for " in said
    assert not any(tmp_path.iterdir())


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("script", "seconds", "status", "said"),
    [("print('fine')", 60.0, 0, "fine"), ("exit(3)", 60.0, 3, ""), ("while True: pass", 0.1, None, "")],
)
def test_gpu_check_tells_how_a_command_ended(
    script: str, seconds: float, status: int | None, said: str, tmp_path: Path
) -> None:
    told = gpu_check._call([sys.executable, "-c", script], seconds, log=tmp_path / "log")
    assert told["status"] == status
    assert (tmp_path / "log").read_text().strip() == said


@pytest.mark.parametrize(("status", "code"), [(0, 0), (5, 0), (1, 1), (None, 1)])
def test_gpu_check_writes_its_record_a_page_and_one_file_to_send_in(
    status: int | None, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(command: list[str], seconds: float, log: Path | None = None) -> dict[str, object]:
        if "--json" in command:
            Path(command[command.index("--json") + 1]).write_text('{"rows": [1.5]}')
        ended = status if "pytest" in command else 0
        return {"command": " ".join(command[1:]), "status": ended, "seconds": 1.0, "last_lines": ["a < b"]}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_check, "describe_machine", lambda device: {"GPU": "a card"})
    monkeypatch.setattr(gpu_check, "_call", call)
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    assert main(["gpu_check", "--report", str(tmp_path / "gpu.html")]) == code
    record = json.loads((tmp_path / "out" / "gpu_check.json").read_text())
    assert record["passed"] is (code == 0)
    assert record["tests"]["status"] == status
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert set(found["figures"]) == set(found["benchmarks"]) == set(record["benchmarks"]) == set(gpu_check.BENCHMARKS)
    assert found["figures"]["fused_step"] == {"rows": [1.5]}
    page = (tmp_path / "gpu.html").read_text()
    assert "a card" in page
    assert "a &lt; b" in page
    assert ("Everything ended well." in page) is (code == 0)
    assert all(name in page for name in gpu_check.BENCHMARKS)


@pytest.mark.exhaustive
def test_runs_without_click_and_rich() -> None:
    code = (
        "import sys; sys.modules.update(click=None, rich=None); from benchmarks.__main__ import main;"
        "main(['simplenet', '--device', 'cpu', '--width', '8', '--batch', '8', '--steps', '1'])"
    )
    python("-c", code).check_returncode()


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert name in capsys.readouterr().out
