"""``halfstep doctor`` on this machine, and on machines it is told about."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

for needed in ("click", "rich"):
    pytest.importorskip(needed)  # the GPU machine has neither

from click.testing import CliRunner

from halfstep.cli import doctor
from halfstep.cli.app import app
from tests.core.test_hardware import has_gpus


def run(monkeypatch: pytest.MonkeyPatch, columns: int = 100) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    return result.output


def row(output: str, name: str) -> list[str]:
    """The cells of the line that begins with ``name``."""
    line = next(line for line in output.splitlines() if line.strip().startswith(name))
    return re.split(r" {2,}", line.strip())


def pretend(monkeypatch: pytest.MonkeyPatch, gpus: list[tuple[str, tuple[int, int]]], units: list[str]) -> None:
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(units, True), raising=False)
    has_gpus(monkeypatch, *gpus)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device=None: SimpleNamespace(total_memory=16 * 2**30)
    )


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    output = run(monkeypatch)
    assert row(output, "cpu")[0] == "cpu"
    assert row(output, "torch ")[1] == torch.__version__
    assert row(output, "Python")[1] == ".".join(map(str, sys.version_info[:3]))
    assert f"{torch.get_num_threads()} thread{'s' * (torch.get_num_threads() > 1)} used" in output
    built_for = "the CPU only" if torch.version.cuda is None else f"CUDA {torch.version.cuda}"
    assert row(output, "torch is built for")[1] == built_for
    assert re.search(r"^On cpu train with opt_level=", output, re.MULTILINE)


SLOW, FAST = "as fp32", "fast"
FP16, BF16 = (f'"O2", dtype=torch.{name}: ' for name in ("float16", "bfloat16"))
DEVICES: dict[str, tuple[list[Any], list[str], dict[str, tuple[str, str, str]]]] = {
    "plain CPU": ([], [], {"cpu": (SLOW, SLOW, '"O0": this is fp32. Computing in 16 bits is no faster here; ')}),
    "AVX512-BF16": ([], ["avx512_bf16"], {"cpu": (SLOW, FAST, BF16)}),
    "Arm": ([], ["fp16_arith", "bf16"], {"cpu": (FAST, FAST, BF16)}),
    "three GPUs": (
        [("NVIDIA A100", (8, 0)), ("Tesla T4", (7, 5)), ("Tesla K40m", (3, 5))],
        [],
        {"cuda:0": (FAST, FAST, BF16), "cuda:1": (FAST, SLOW, FP16), "cuda:2": (SLOW, SLOW, '"O0": ')},
    ),
}


@pytest.mark.parametrize("name", DEVICES)
def test_devices_and_advice(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    gpus, units, table = DEVICES[name]
    pretend(monkeypatch, gpus, units)
    output = run(monkeypatch)
    for device, (fp16, bf16, advice) in table.items():
        assert row(output, device)[-2:] == [fp16, bf16]
        assert f"On {device} train with opt_level={advice}" in output
    lacking = [device for device, speeds in table.items() if SLOW in speeds]
    assert all(f"{device} has no units for" in output for device in lacking)
    for gpu, (major, minor) in gpus:
        assert f"{gpu}, compute capability {major}.{minor}, 16 GiB" in output


@pytest.mark.parametrize("gpus", [[], [("NVIDIA GeForce RTX 5090", (12, 0))]])
def test_fits_80_columns(monkeypatch: pytest.MonkeyPatch, gpus: list[tuple[str, tuple[int, int]]]) -> None:
    pretend(monkeypatch, gpus, ["avx512_bf16"])
    assert all(len(line) <= 80 for line in run(monkeypatch, columns=80).splitlines())


def test_tells_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    output = run(monkeypatch)
    assert row(output, "C++ compiler")[1] == "none found: torch.compile cannot make kernels for the CPU"
    assert row(output, "Triton")[1].startswith("not installed: ")


def test_the_compiler_that_torch_would_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", sys.executable)
    assert row(run(monkeypatch, columns=200), "C++ compiler")[1] == sys.executable


def test_the_same_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, [("Tesla T4", (7, 5))], ["avx512_bf16"])
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    known = json.loads(result.output)
    cpu, gpu = known["devices"]
    assert (cpu["device"], cpu["fast"], cpu["advice"]["opt_level"]) == ("cpu", ["bfloat16"], "O2")
    assert (gpu["device"], gpu["fast"], gpu["advice"]["dtype"]) == ("cuda:0", ["float16"], "float16")
    assert (cpu["emulated"]["bfloat16"], gpu["emulated"]["float16"]) == ([], [])
    assert "convolution" in cpu["emulated"]["float16"]
    assert "convolution" in gpu["emulated"]["bfloat16"]
    assert gpu["name"].startswith("Tesla T4")
    assert cpu["name"] == known["facts"]["CPU"]
    assert known["facts"]["torch"] == torch.__version__
    assert {"Python", "halfstep", "C++ compiler", "Triton"} <= known["facts"].keys()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), torch.bfloat16, (1, 2.5), {"a": None}, True])
def test_evidence_of_any_kind_is_json(value: Any) -> None:
    text = json.dumps(doctor._plain({"value": value}), allow_nan=False)
    expected = {torch.bfloat16: "torch.bfloat16", (1, 2.5): [1, 2.5]} if isinstance(value, (tuple, torch.dtype)) else {}
    finite = value if not isinstance(value, float) else str(value)
    assert json.loads(text)["value"] == (expected[value] if expected else finite)


@pytest.mark.exhaustive
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_triton_is_not_imported() -> None:
    # A broken Triton is one of the things that a doctor is called for.
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom halfstep.cli.app import app\n"
        "result = CliRunner().invoke(app, ['doctor'])\nassert result.exit_code == 0, result.output\n"
        "assert 'triton' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
