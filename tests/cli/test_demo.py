"""``halfstep demo``: the command, its page, and that the 16-bit levels learn as well as fp32."""

from __future__ import annotations

import importlib.util
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

for needed in ("click", "rich", "sklearn", "matplotlib", "jinja2"):
    if importlib.util.find_spec(needed) is None:  # the GPU machine has none of them; importing them here takes seconds
        pytest.skip(f"could not find {needed}", allow_module_level=True)

from click.testing import CliRunner

from halfstep import __version__, amp
from halfstep.cli import demo
from halfstep.cli.app import SUBCOMMANDS, app
from halfstep.cli.demo import report, training
from halfstep.cli.demo.training import EPOCH_STEPS, Run, Settings
from halfstep.core import hardware

LEVELS = ("O0", "O1", "O2", "O3")
CPU = torch.device("cpu")


def run(*args: str, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, list(args), terminal_width=100)
    assert result.exit_code == exit_code, result.output
    return result.output


@pytest.fixture(scope="module")
def demo_output(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """What a small run prints and the page it writes."""
    out = tmp_path_factory.mktemp("demo") / "made" / "by the demo"
    text = run("demo", "--device", "cpu", "--epochs", "2", "--width", "16", "--out", str(out))
    return text, (out / "report.html").read_text(encoding="utf-8")


@pytest.mark.exhaustive
def test_one_table_with_every_level(demo_output: tuple[str, str]) -> None:
    text, _ = demo_output
    rows = {cells[0]: cells for line in text.splitlines() if (cells := line.split()) and cells[0] in LEVELS}
    assert list(rows) == list(LEVELS)
    for level, cells in rows.items():
        assert cells[1] == ("float32" if level == "O0" else "bfloat16")
        assert float(cells[2]) > 20  # percent; chance is 10
        assert cells[-1] == "0"  # steps skipped
    assert rows["O0"][6] == "1.00"
    assert all(len(line) <= 80 for line in text.splitlines() if line.strip() and "report.html" not in line)


def test_report_is_one_self_contained_page(demo_output: tuple[str, str]) -> None:
    text, page = demo_output
    assert "report.html" in text
    assert page.count("<svg") == 2
    for level in LEVELS:
        assert re.search(rf"</span>{level}</td>", page)
    for fact in ("16-bit units", torch.__version__, __version__, "halfstep demo --device cpu"):
        assert fact in page
    fetched = re.findall(r"""(?:src|href)\s*=\s*["'](?!#)([^"']*)|url\((?!#)""", page)
    assert not fetched, "the page must need nothing from outside"
    assert "<script" not in page


def test_casting_is_down_again(demo_output: tuple[str, str]) -> None:
    a = torch.ones(2, 2)
    assert (a @ a).dtype is torch.float32


def test_one_level_alone(tmp_path: Path) -> None:
    text = run("demo", "--device", "cpu", "--levels", "o2", "--epochs", "1", "--width", "8", "--out", str(tmp_path))
    assert re.search(r"^\s*O2\s+bfloat16", text, re.M)
    assert "ratio" in text
    assert "to O2" in text


@pytest.mark.parametrize("levels", ["O4", "01", "O0,,O1", "O1,O1", ""])
def test_wrong_levels(levels: str) -> None:
    assert "O0,O1,O2,O3, each once" in " ".join(run("demo", "--levels", levels, exit_code=2).split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_cuda() -> None:
    assert "torch finds no CUDA device here" in run("demo", "--device", "cuda", exit_code=1)


def test_missing_extras_are_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None if name in ("sklearn", "matplotlib") else object())
    text = run("demo", exit_code=1)
    assert "scikit-learn, matplotlib" in text
    assert "pip install 'halfstep[demo]'" in text


@pytest.mark.exhaustive
def test_a_machine_without_units_is_told_so_and_trains_at_full_width(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hardware, "cpu_units", lambda dtype: [])
    seen: list[Settings] = []
    real = training.train
    monkeypatch.setattr(training, "train", lambda settings, on_step: seen.append(settings) or real(settings, on_step))
    text = run("demo", "--device", "cpu", "--levels", "O0", "--epochs", "1", "--out", str(tmp_path))
    assert "no bfloat16 units" in text
    assert seen[0].width == 64
    assert "no bfloat16 units" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_skipped_steps_and_a_moving_scale_are_told(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    run_ = Run("O2", torch.float16, model, torch.optim.SGD(model.parameters(), lr=0.1))
    run_.losses = [2.0, float("nan"), *[1.0] * (EPOCH_STEPS - 2)]
    run_.loss_scales = [65536.0, 32768.0, *[32768.0] * (EPOCH_STEPS - 2)]
    run_.step_seconds = [0.002] * EPOCH_STEPS
    run_.steps_skipped = 1
    header, (row,) = report.summarize([run_])
    told = dict(zip(header, row, strict=True))
    assert told["loss scale"] == "32768"
    assert told["steps skipped"] == "1"
    assert told["step ms"] == "2.0"
    report.write_report(tmp_path / "r.html", [run_], Settings(["O2"], CPU, torch.float16, epochs=1), ["a <note>"])
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "halves at each overflow" in page
    assert "a &lt;note&gt;" in page


@pytest.mark.exhaustive
def test_levels_of_one_seed_start_alike_and_see_the_same_data() -> None:
    settings = Settings(LEVELS, CPU, torch.bfloat16, epochs=1, width=8)
    runs = training.train(settings)
    again = training.train(settings)
    for one, other in zip(runs, again, strict=True):
        assert one.losses == other.losses, f"{one.level} is not repeatable"
    first = [r.losses[0] for r in runs]
    assert max(first) - min(first) < 0.02 * first[0]
    assert runs[2].held_bytes < runs[0].held_bytes * 1.05
    assert runs[3].held_bytes < runs[0].held_bytes * 0.6


@pytest.mark.exhaustive
def test_16_bit_levels_learn_as_well_as_fp32() -> None:
    accuracy: dict[str, list[float]] = {"O0": [], "O1": [], "O2": []}
    for seed in range(3):
        for result in training.train(Settings(list(accuracy), CPU, torch.bfloat16, epochs=6, seed=seed, width=24)):
            accuracy[result.level].append(100 * result.test_accuracy)
    mean = {level: statistics.fmean(values) for level, values in accuracy.items()}
    assert mean["O0"] > 95
    assert mean["O1"] > mean["O0"] - 1, accuracy
    assert mean["O2"] > mean["O0"] - 1, accuracy


@pytest.mark.exhaustive
def test_help_lists_the_subcommands_without_importing_them() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from halfstep.cli.app import app;"
        "print(CliRunner().invoke(app, ['--help']).output);"
        "print(sorted(m for m in sys.modules if m.startswith('halfstep.cli.')))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert all(name in output for name in SUBCOMMANDS)
    assert "['halfstep.cli.app']" in output


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_subcommand_has_help(name: str) -> None:
    assert name in run(name, "--help")


def test_unknown_subcommand() -> None:
    assert "No such command 'dmeo'" in run("dmeo", exit_code=2)


@pytest.mark.exhaustive
def test_module_and_version() -> None:
    output = subprocess.run([sys.executable, "-m", "halfstep", "--version"], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == f"halfstep, version {__version__}"


def test_demo_leaves_amp_usable(demo_output: tuple[str, str]) -> None:
    model = torch.nn.Linear(4, 4)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O0", verbosity=0)
    with amp.scale_loss(model(torch.ones(1, 4)).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    before = model.weight.detach().clone()
    optimizer.step()
    assert torch.equal(model.weight, before - 0.1)
