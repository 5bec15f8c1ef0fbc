"""``halfstep run --numerics``: what is saved of a script, however it calls amp and however it ends."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from halfstep import amp
from halfstep.cli.run_numerics import Monitors
from halfstep.numerics import Row, load_rows
from tests.support.python import python
from tests.support.worlds import scaled_step, with_optimizer

MODEL = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.ones(2, 4)
"""
SCALE_LOSS = """
from apex import amp
model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0, loss_scale=128.0)
for step in range(5):
    with amp.scale_loss(model(x).float().mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
SCALER = """
from halfstep import amp
scaler = amp.GradScaler(init_loss_scaling=128.0)
for step in range(5):
    with amp.auto_cast(level="O1", dtype="bfloat16"):
        loss = model(x).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""
PLAIN = """
for step in range(5):
    model(x).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def run(tmp_path: Path, code: str, *options: str, **variables: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    script, file = tmp_path / "train.py", tmp_path / "run.jsonl"
    script.write_text(code)
    line = ["-m", "halfstep", "run", *options, str(script)]
    return python(*line, cwd=tmp_path, env={**os.environ, **variables}, quiet=True), file


def seen(rows: list[Row], tensor: str, module: str) -> list[int]:
    return [row.step for row in rows if (row.tensor, row.module) == (tensor, module)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("code", "dtype", "outputs", "updates"),
    [
        pytest.param(SCALE_LOSS, "float16", [0, 2, 4], [2, 4], id="scale_loss"),  # masters are made in the first step
        pytest.param(SCALER, "bfloat16", [2, 4], [0, 2, 4], id="GradScaler"),  # the model is found at its first step
        pytest.param(PLAIN, "float32", [2, 4], [0, 2, 4], id="without amp"),
    ],
)
def test_every_second_step_is_saved(
    tmp_path: Path, code: str, dtype: str, outputs: list[int], updates: list[int]
) -> None:
    done, file = run(tmp_path, MODEL + code, "--numerics", "run.jsonl", "--every", "2")
    assert (done.returncode, done.stderr) == (0, f"halfstep: wrote {file}\n")
    rows = load_rows(file)
    assert seen(rows, "output", "0") == outputs
    assert seen(rows, "grad", "0.weight") == [0, 2, 4]
    assert seen(rows, "update", "0.weight") == updates
    assert {row.dtype for row in rows if (row.tensor, row.module) == ("output", "0")} == {dtype}


@pytest.mark.exhaustive
def test_rows_are_saved_when_the_script_fails_and_pictures_where_the_file_is_html(tmp_path: Path) -> None:
    done, _ = run(tmp_path, f"{MODEL}{PLAIN}raise KeyError('lost')\n", "--numerics", "out/run.html", "--every", "1")
    assert done.returncode == 1
    assert "KeyError: 'lost'" in done.stderr
    page = (tmp_path / "out" / "run.html").read_text(encoding="utf-8")
    assert "train.py</h1>" in page
    assert "halfstep run --numerics=out/run.html --every=1" in page


@pytest.mark.exhaustive
def test_rows_are_saved_when_the_script_is_terminated(tmp_path: Path) -> None:
    end = "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\nprint('it goes on')\n"
    done, file = run(tmp_path, MODEL + PLAIN + end, "--numerics", "run.jsonl", "--every", "4")
    assert (done.returncode, done.stdout) == (143, "")
    assert seen(load_rows(file), "grad", "0.weight") == [0, 4]


@pytest.mark.exhaustive
def test_each_rank_has_a_file(tmp_path: Path) -> None:
    done, file = run(tmp_path, MODEL + PLAIN, "--numerics", "run.jsonl", RANK="3")
    assert done.returncode == 0
    assert not file.exists()
    assert seen(load_rows(tmp_path / "run.jsonl.rank3"), "grad", "0.weight") == [*range(5)]


@pytest.mark.exhaustive
def test_a_script_without_steps_is_said_to_have_none(tmp_path: Path) -> None:
    done, file = run(tmp_path, "print('hello')\n", "--numerics", "run.jsonl")
    assert done.returncode == 0
    assert done.stderr == "halfstep: no optimizer stepped, so run.jsonl has no rows.\n"
    assert load_rows(file) == []


class Generator(torch.nn.Linear):
    """A model of two."""


def test_two_models_have_names_of_their_own() -> None:
    monitors = Monitors(every=1)
    models: list[torch.nn.Module] = [Generator(2, 2), torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for optimizer in optimizers:
        monitors.see_step(optimizer, (), {})
        monitors.see_step(optimizer, (), {})  # again: it is known
    models[2](models[1](models[0](torch.ones(1, 2))).expand(1, 2)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    names = [row.module for row in monitors.rows() if row.tensor == "grad"]
    assert names == [f"{name}.{part}" for name in ("Generator", "Linear0", "Linear1") for part in ("weight", "bias")]


def test_where_an_overflow_began_is_named_with_its_model() -> None:
    monitors = Monitors(every=1)
    models = [torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.Linear(2, 2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for optimizer in optimizers:
        monitors.see_step(optimizer, (), {})
    with torch.no_grad():
        models[0][0].weight.fill_(torch.inf)  # type: ignore[index, union-attr]
    models[1](models[0](torch.ones(1, 2))).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    found = {row.module: row.began_in for row in monitors.rows() if row.tensor == "output"}
    assert found == {"Sequential.0": "Sequential.0", "Linear.(root)": "(step)"}


def test_two_optimizers_of_one_model_have_its_outputs_once() -> None:
    monitors = Monitors(every=1)
    model = torch.nn.Linear(2, 1)
    optimizers = [torch.optim.SGD([param], lr=0.1) for param in model.parameters()]
    for optimizer in optimizers:
        monitors.see_step(optimizer, (), {})
    model(torch.ones(1, 2)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    rows = monitors.rows()
    assert [row.module for row in rows if row.tensor == "output"] == ["(root)"]
    assert [row.module for row in rows if row.tensor == "update"] == ["weight", "bias"]


def test_the_model_is_found_inside_of_its_wrapper() -> None:
    class Wrapper(torch.nn.Module):
        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.module(x)

    wrapped = Wrapper(torch.nn.Sequential(torch.nn.Linear(2, 1)))
    monitors = Monitors(every=1)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    monitors.see_step(optimizer, (), {})
    wrapped(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert {row.module for row in monitors.rows() if row.tensor == "grad"} == {"0.weight", "0.bias"}


def test_models_that_amp_prepares_are_seen_from_their_first_step() -> None:
    from halfstep.stepping.attached import creation_callbacks

    monitors = Monitors(every=1)
    creation_callbacks.append(monitors.see_created)
    try:
        model, optimizer = with_optimizer(torch.nn.Linear(2, 1), torch.optim.SGD, lr=0.1)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        scaled_step(model(torch.ones(1, 2)).sum(), optimizer)
    finally:
        creation_callbacks.remove(monitors.see_created)
    assert {row.step for row in monitors.rows() if row.tensor == "output"} == {0}
