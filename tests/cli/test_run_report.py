"""``halfstep run --report``: one page on how every step of a script went, however it ended."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.exhaustive  # each test starts a process

TRAIN = """
import sys
import torch
from apex import amp

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0, loss_scale="dynamic")
for step in range(6):
    loss = model(torch.ones(2, 4)).mean() * (float("inf") if step == 2 else 1.0)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
HALF = """
import torch
from apex.fp16_utils import FP16_Optimizer

model = torch.nn.Linear(4, 1).half()
optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.01), static_loss_scale=128.0, verbose=False)
for step in range(3):
    optimizer.zero_grad()
    optimizer.backward(model(torch.ones(2, 4).half()).float().mean())
    optimizer.step()
"""


def run(tmp_path: Path, code: str, *options: str) -> tuple[int, str]:
    script, report = tmp_path / "train.py", tmp_path / "out" / "report.html"
    script.write_text(code)
    command = [sys.executable, "-W", "ignore", "-m", "halfstep", "run", "--report", str(report), str(script), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    return done.returncode, report.read_text(encoding="utf-8") if report.exists() else done.stderr


def cells(page: str) -> list[str]:
    return re.findall(r"<td>(.*?)</td>", page)


def test_steps_skips_and_scales(tmp_path: Path) -> None:
    status, page = run(tmp_path, TRAIN, "--epochs", "<3>")
    assert status == 0
    assert cells(page)[:4] == ["SGD", "6", "2", "16384"]  # 2**16 is too much for the first step, too
    assert "It ran to its end." in page
    assert "--epochs &lt;3&gt;" in page
    assert page.count("<svg") == 3
    assert not re.search(r'(src|href)="(?!#)', page), "nothing is loaded from elsewhere"


def test_fp16_optimizer(tmp_path: Path) -> None:
    status, page = run(tmp_path, HALF)
    assert status == 0
    assert cells(page)[:4] == ["SGD", "3", "0", "128"]


@pytest.mark.parametrize(
    ("last", "status", "said"),
    [
        ("raise KeyError('lost')", 1, "It ended with KeyError: &#39;lost&#39;"),
        ("sys.exit(3)", 3, "It exited with 3."),
        ("sys.exit()", 0, "It ran to its end."),
        ("raise KeyboardInterrupt", None, "It ended with KeyboardInterrupt"),
    ],
)
def test_however_it_ends(tmp_path: Path, last: str, status: int | None, said: str) -> None:
    found, page = run(tmp_path, f"{TRAIN}\n{last}\n")
    assert status is None or found == status
    assert said in page
    assert cells(page)[1] == "6"


def test_a_script_without_amp(tmp_path: Path) -> None:
    status, page = run(tmp_path, "print('hello')\n")
    assert status == 0
    assert "No optimizer stepped under amp" in page
    assert "<svg" not in page


def test_only_the_first_process_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert run(tmp_path, "print('hello')\n") == (0, "")
