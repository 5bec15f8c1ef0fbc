"""``halfstep profile``: levels, and scripts that end early, without an error or with one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import halfstep
from halfstep.profiling.run import of_run
from tests.support.python import python

for needed in ("click", "rich"):
    pytest.importorskip(needed)  # the GPU machine has neither

TRAINING = """
import sys, torch
from torch import nn
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for _ in range(int(sys.argv[1])):
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    print("weights", model[0].weight.dtype)
"""


def profile(path: Path, *options: str, steps: int) -> subprocess.CompletedProcess[str]:
    (script := path / "train.py").write_text(TRAINING)
    return python("-m", "halfstep", "profile", *options, str(script), str(steps))


@pytest.mark.exhaustive
def test_o2_casts_the_model_of_a_script_that_knows_no_levels(tmp_path: Path) -> None:
    found = profile(tmp_path, "--level=O2", f"--html={tmp_path / 'page.html'}", steps=20)
    assert found.returncode == 0, found.stderr
    assert "Warning" not in found.stderr
    assert found.stdout.count("weights torch.bfloat16\n") == 7  # the eighth step ends the script
    assert "a step takes" in found.stdout
    assert "bfloat16" in (tmp_path / "page.html").read_text()


@pytest.mark.exhaustive
def test_a_script_that_ends_before_a_step_is_measured_says_so(tmp_path: Path) -> None:
    found = profile(tmp_path, "--level=O1", steps=2)
    assert found.returncode == 1
    assert "Error: train.py has ended after 2 optimizer steps in this process." in found.stderr
    assert "a step takes" not in found.stdout


def ended(end: str, steps: int, prepare: Any = None) -> Any:
    names = {"sys": SimpleNamespace(argv=["train.py", steps], exit=sys.exit)}
    text = TRAINING.replace("import sys, torch", "import torch")
    return of_run(lambda: exec(text + end, names), prepare)


def test_exit_without_an_error_is_the_end_of_a_script() -> None:
    assert ended("sys.exit(0)", 3) == 3
    found = ended("sys.exit()", 5)
    assert found.steps == 2  # what comes after the last step of the optimizer is none
    for end, error in (("sys.exit(7)", SystemExit), ("raise ValueError", ValueError)):
        with pytest.raises(error):
            ended(end, 1)


OTHERS = {
    "another thread": """
from concurrent.futures import ThreadPoolExecutor
def train():
    for _ in range(9): step()
with ThreadPoolExecutor() as pool:
    pool.submit(train)
""",
    "another profiler, whose error is caught": """
import halfstep
for _ in range(9):
    try: halfstep.profile(step, warmup=0, steps=1)
    except Exception: pass
""",
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OTHERS)
def test_another_thread_or_profiler_ends_the_script_with_one_error(name: str) -> None:
    step = "def step():\n    model(torch.randn(1, 64)).sum().backward()\n    optimizer.step()\n"
    with pytest.raises(halfstep.HalfstepError, match=r"one profiler at a time.*run the steps in the main thread"):
        ended(step + OTHERS[name], 0)
    assert ended("", 4).steps == 1  # the profiler is free again


def test_o2_needs_a_module_that_has_the_parameters() -> None:
    text = """
weight = torch.zeros(4, requires_grad=True)
optimizer = torch.optim.SGD([weight], 0.1)
weight.sum().backward()
optimizer.step()
"""
    with pytest.raises(halfstep.HalfstepError, match="No module has the parameters of this optimizer"):
        ended(text, 0, lambda *_: None)
