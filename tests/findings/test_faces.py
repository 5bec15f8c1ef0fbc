"""``halfstep doctor SCRIPT`` and the callback of ``Model.fit``."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import halfstep
from halfstep import amp
from halfstep.model import CheckPrecision
from tests.support.python import python
from tests.support.worlds import scaled_step, with_optimizer

# ---- the callback


def fitted(dtype: torch.dtype, level: str | None, callback: CheckPrecision) -> CheckPrecision:
    network = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 4)).to(dtype)
    model, optimizer = with_optimizer(halfstep.Model(network), torch.optim.AdamW, lr=1e-7)
    model.prepare(optimizer, nn.CrossEntropyLoss(), amp_configs=level and {"level": level, "dtype": "bfloat16"})
    data = TensorDataset(torch.randn(32, 8).to(dtype), torch.randint(4, (32,)))
    model.fit(data, batch_size=8, epochs=2, verbose=0, callbacks=callback)
    return callback


def test_the_callback_checks_and_watches(caplog: pytest.LogCaptureFixture) -> None:
    found = fitted(torch.bfloat16, None, CheckPrecision(every=2)).findings
    assert [each.code for each in found] == ["HS101", "HS102", "HS103", "HS101"]
    assert "as measured" in found[-1].message
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]


@pytest.mark.parametrize("level", [None, "O1", "O2"])
def test_the_callback_is_silent_if_all_is_well(level: str | None, caplog: pytest.LogCaptureFixture) -> None:
    assert fitted(torch.float32, level, CheckPrecision(every=1)).findings == []
    assert caplog.records == []


def test_without_every_nothing_is_watched_and_after_the_end_nothing_is_checked() -> None:
    codes = [each.code for each in fitted(torch.bfloat16, None, CheckPrecision(after=7, every=None)).findings]
    assert codes == ["HS101", "HS102", "HS103"]
    assert fitted(torch.bfloat16, None, CheckPrecision(after=8, every=None)).findings == []


# ---- the command

WRONG = """
import sys
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 4)).bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), lr=float(sys.argv[1]))
for step in range(3):
    loss = nn.functional.cross_entropy(model(torch.randn(16, 8).bfloat16()), torch.randint(4, (16,)))
    loss.backward()
    try:
        optimizer.step(); optimizer.zero_grad()
    except Exception:
        print("caught")
    print("after", step)
"""

RIGHT = """
import torch
from torch import nn
from apex import amp

model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
model, optimizer = amp.initialize(model, optimizer, opt_level="O5")
for step in range(3):
    loss = nn.functional.cross_entropy(model(torch.randn(16, 8)), torch.randint(4, (16,)))
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step(); optimizer.zero_grad()
"""

BY_HAND = """
import torch
from torch import nn

truth, model = nn.Linear(8, 4), nn.Linear(8, 4).bfloat16()
masters = [p.detach().float() for p in model.parameters()]
optimizer = torch.optim.SGD(masters, lr=0.1)
with torch.no_grad():
    y = truth(torch.randn(16, 8))
(model(torch.randn(16, 8).bfloat16()).float() - y).square().mean().backward()
for master, p in zip(masters, model.parameters()):
    master.requires_grad_()
    master.grad = p.grad.float()
optimizer.step()
"""

SCALED = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", enabled=ENABLED)
for step in range(3):
    with torch.autocast("cpu", torch.float16):
        loss = nn.functional.cross_entropy(model(torch.randn(16, 8)), torch.randint(4, (16,)))
    scaler.scale(loss).backward()
    scaler.step(optimizer); optimizer.zero_grad()
    scaler.update()
"""


@pytest.fixture
def doctor(tmp_path: Path):
    pytest.importorskip("click")

    def run(text: str, *args: str, json: bool = False) -> tuple[int, str]:
        script = tmp_path / "train.py"
        script.write_text(text)
        done = python("-m", "halfstep", "doctor", *(["--json"] if json else []), str(script), *args)
        return done.returncode, done.stdout if json else done.stdout + done.stderr

    return run


OF_THIS_MACHINE = "HS111"  # it has no 16-bit units


def codes_in(output: str) -> list[str]:
    """The codes of findings that a script would have on any machine."""
    found = [line[:5] for line in output.splitlines() if line.startswith("HS")]
    return [code for code in found if code != OF_THIS_MACHINE]


def test_doctor_names_what_a_script_loses(doctor) -> None:
    code, output = doctor(WRONG, "1e-6")
    assert code == 1
    assert codes_in(output)[0] == "HS101"
    assert "and HS102 error" in output
    assert "where: *" in output
    assert "caught" not in output


def test_doctor_gives_the_same_as_json(doctor) -> None:
    code, output = doctor("print('a line of the script')\n" + WRONG, "1e-6", json=True)
    found = json.loads(output)
    assert code == 1
    assert found["script"].endswith("train.py")
    codes = [finding["code"] for finding in found["findings"] if finding["code"] != OF_THIS_MACHINE]
    assert codes == ["HS101", "HS102", "HS103", "HS105"]
    fields = {"code", "severity", "where", "message", "evidence", "fix"}
    assert all(finding.keys() == fields and finding["message"] for finding in found["findings"])


def test_doctor_is_content_with_a_script_for_apex(doctor) -> None:
    code, output = doctor(RIGHT)
    assert code == 0
    assert codes_in(output) == []
    assert "halfstep.diagnose: nothing found in" in output
    assert re.search(r"later steps .*: halfstep run --numerics numerics.html \S*train.py$", output.strip())


def test_doctor_finds_the_model_of_masters_made_by_hand(doctor) -> None:
    code, output = doctor(BY_HAND)
    assert code == 0
    assert codes_in(output) == []


@pytest.mark.parametrize("enabled", [True, False])
def test_doctor_sees_the_scaler_of_a_script(doctor, enabled: bool) -> None:
    code, output = doctor(SCALED.replace("ENABLED", str(enabled)))
    assert code == (0 if enabled else 1)
    assert ("HS107" in output) is not enabled


def test_doctor_tells_of_a_script_without_a_step(doctor) -> None:
    code, output = doctor("print('hello')")
    assert code == 1
    assert "train.py has ended without a step of an optimizer on a model that it called" in output


def test_a_script_on_stdin_and_a_module_are_checked(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WRONG)
    for given, stdin in (["-m", "train", "1e-6"], ""), (["-", "1e-6"], WRONG):
        done = python("-m", "halfstep", "doctor", *given, cwd=tmp_path, stdin=stdin)
        assert (done.returncode, "HS101" in done.stdout) == (1, True), done.stderr


def test_what_processes_of_a_script_print_is_no_json_either(doctor) -> None:
    said = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'print(1)'], check=True)\n"
    code, output = doctor(said + WRONG, "1e-6", json=True)
    assert (code, bool(json.loads(output)["findings"])) == (1, True)


def test_a_script_that_fails_fails(doctor) -> None:
    assert doctor("raise ZeroDivisionError")[0] == 1


FAILS = """
import torch
from torch import nn
nn.Sequential(nn.Linear(2, 2))(torch.ones(3, 3))
"""


@pytest.mark.exhaustive
def test_the_traceback_of_a_script_that_fails_has_no_frames_of_ours(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(FAILS)
    found = python("-m", "halfstep", "doctor", "fails.py", cwd=tmp_path)
    assert found.returncode == 1
    lines = [line for line in found.stderr.splitlines() if line.lstrip().startswith("File ")]
    assert "fails.py" in lines[0]
    assert all(f"{os.sep}torch{os.sep}" in line for line in lines[1:])
    assert found.stderr.rstrip().endswith("shapes cannot be multiplied (3x3 and 2x2)")


# ---- an optimizer that decorate was not given


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_a_forgotten_optimizer_is_named_after_its_first_step(
    scaled: bool, given: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = with_optimizer(nn.Linear(8, 4), torch.optim.AdamW, lr=1e-6)
    amp.decorate(model, optimizer if given else None, level="O2", dtype="bfloat16")
    scaler = amp.GradScaler(enable=scaled)
    for _ in range(2):
        scaled_step(model(torch.ones(2, 8)).sum(), optimizer, scaler)
    lines = [record.getMessage() for record in caplog.records if "HS101" in record.getMessage()]
    assert len(lines) == (not given)
    assert all("bfloat16 weights, AdamW keeps no masters" in line for line in lines)
