"""``halfstep run --report``: one page on how every step of a script went, however it ended."""

from __future__ import annotations

import html
import re
import subprocess
from pathlib import Path

import pytest

from halfstep.cli.run_report import robust_limit
from tests.support.python import python

pytestmark = pytest.mark.exhaustive  # nearly each test starts a process

TRAIN = """
import sys
import torch
from apex import amp

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0, loss_scale="dynamic")
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
SCALER = """
import torch
from halfstep import amp

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.Rprop(model.parameters(), lr=0.01)
scaler = amp.GradScaler(init_loss_scaling=1024.0, decr_every_n_nan_or_inf=1)
for step in range(5):
    scaler.scale(model(torch.ones(2, 4)).mean() * (float("inf") if step == 2 else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""


def run(tmp_path: Path, code: str, *options: str) -> tuple[int, str]:
    """Its exit status, and the report, or what it printed to stderr where there is none."""
    done, report = run_process(tmp_path, code, *options)
    return done.returncode, report or done.stderr


def run_process(tmp_path: Path, code: str, *options: str) -> tuple[subprocess.CompletedProcess[str], str]:
    script, report = tmp_path / "train.py", tmp_path / "out" / "report.html"
    script.write_text(code)
    done = python("-m", "halfstep", "run", "--report", str(report), str(script), *options, quiet=True)
    return done, report.read_text(encoding="utf-8") if report.exists() else ""


def cells(page: str) -> list[str]:
    """Those of all tables, and of rows the heading, too."""
    return re.findall(r'<t[dh](?: scope="row")?>(.*?)</t[dh]>', page)


def test_steps_skips_and_scales(tmp_path: Path) -> None:
    done, page = run_process(tmp_path, TRAIN, "--epochs", "<3>")
    # 2**16 is too much for the first step, too
    assert (done.returncode, cells(page)[:4]) == (0, ["SGD", "6", "2", "16384"])
    assert "It ran to its end." in page
    command = html.unescape(re.search(r"<code>(.*?)</code>", page)[1])  # type: ignore[index]
    assert re.fullmatch(r"halfstep run --report=.*train\.py --epochs '<3>'", command)
    assert page.count('role="img"') == 4
    assert not re.search(r'(src|href)="(?!#)', page), "nothing is loaded from elsewhere"
    assert done.stderr.endswith("halfstep: 2 of 6 steps were skipped for an overflow.\n")


def test_a_training_that_failed_did_not_run_to_its_end(tmp_path: Path) -> None:
    done, page = run_process(tmp_path, TRAIN.replace("step == 2", "step > 0"))
    assert re.search(r'<p class="note">6 of 6 steps were skipped\. The loss is -?inf\.', page)
    assert f"halfstep: wrote {tmp_path / 'out' / 'report.html'}\n" in done.stderr


def test_the_scale_is_the_one_that_each_step_used(tmp_path: Path) -> None:
    _, page = run(tmp_path, TRAIN)
    changes = page[page.index("<summary>Changes") :]
    assert cells(changes)[:9] == ["SGD", "0", "65536", "SGD", "1", "32768", "SGD", "3", "16384"]


def test_a_grad_scaler_whose_optimizer_is_skipped_on_the_host(tmp_path: Path) -> None:
    done, page = run_process(tmp_path, SCALER)
    assert cells(page)[:4] == ["Rprop", "5", "1", "512"]
    assert "1 of 5 steps was skipped for an overflow." in done.stderr


def test_fp16_optimizer(tmp_path: Path) -> None:
    status, page = run(tmp_path, HALF)
    assert (status, cells(page)[:4]) == (0, ["SGD", "3", "0", "128"])


@pytest.mark.parametrize(
    ("last", "status", "said"),
    [
        ("sys.exit(3)", 3, "It exited with 3."),
        ("sys.exit()", 0, "It ran to its end."),
        ('raise KeyboardInterrupt("lost")', None, "It ended with KeyboardInterrupt: lost"),
    ],
)
def test_however_it_ends(tmp_path: Path, last: str, status: int | None, said: str) -> None:
    found, page = run(tmp_path, f"{TRAIN}\n{last}\n")
    assert (None if status is None else found, said in page, cells(page)[1]) == (status, True, "6")


def test_a_script_without_amp(tmp_path: Path) -> None:
    status, page = run(tmp_path, "print('hello')\n")
    assert (status, "No optimizer stepped under amp" in page) == (0, True)
    assert "<svg" not in page


def test_warm_up_does_not_flatten_the_times() -> None:
    times = [5.0, 1.0] + [0.01, 0.012, 0.011] * 20
    assert 0.012 < robust_limit(times) < 0.1
    assert robust_limit([0.01, 0.011, 0.012]) == pytest.approx(1.1 * 0.012), "no outliers, no cut"
    assert robust_limit([0.01] * 6 + [1.0] * 4) > 1.0, "a third of all steps are no outliers"


def test_only_the_first_process_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert run(tmp_path, "print('hello')\n") == (0, "")
