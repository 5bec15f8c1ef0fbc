"""``halfstep demo``: the command, its page, and that the 16-bit levels learn as well as fp32."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

for needed in ("click", "rich", "sklearn"):
    if importlib.util.find_spec(needed) is None:  # the GPU machine has none of them; importing one takes seconds
        pytest.skip(f"could not find {needed}", allow_module_level=True)

from click.testing import CliRunner
from rich.console import Console

from halfstep import __version__, amp
from halfstep.cli import demo
from halfstep.cli.app import app
from halfstep.cli.demo import report, training
from halfstep.cli.demo.training import EPOCH_STEPS, LOSS_SCALE, DemoRun, DemoSettings
from halfstep.core import hardware
from halfstep.core.text import install_line
from tests.numerics.test_report import Reader
from tests.support.worlds import scaled_backward

pytestmark = pytest.mark.timeout(900)  # the demo trains; on a busy machine that takes ten times as long

LEVELS = ("O0", "O1", "O2", "O3")
CPU = torch.device("cpu")


def run(*args: str, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, list(args), terminal_width=100)
    assert result.exit_code == exit_code, result.output
    return result.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo") / "made" / "by the demo"


@pytest.fixture(scope="module")
def demo_output(folder: Path) -> tuple[str, str]:
    """What a small run prints and the page it writes."""
    text = run("demo", "--device", "cpu", "--epochs", "2", "--width", "8", "--out", str(folder))
    return text, (folder / "report.html").read_text(encoding="utf-8")


@pytest.mark.exhaustive
def test_one_table_with_every_run(demo_output: tuple[str, str]) -> None:
    text, _ = demo_output
    lines = [line.split() for line in text.splitlines() if "%" in line]  # no losses of an epoch
    rows = [cells for cells in lines if cells[0] in LEVELS]
    assert [tuple(cells[:2]) for cells in rows] == [
        ("O0", "float32"),
        ("O1", "bfloat16"),
        ("O2", "bfloat16"),
        ("O3", "bfloat16"),
        ("O2", "float16"),
    ]
    for level, dtype, accuracy, _, _, _, computed, *_ in rows:
        assert computed == ("fp32" if level == "O0" else computed_in(dtype))
        assert float(accuracy) > 20  # percent; chance is 10
    assert rows[0][5] == "1.00"
    assert [cells[-1] for cells in rows[:4]] == ["0"] * 4  # steps skipped
    assert int(rows[4][-1]) > 0
    long = ("report.html", "epoch ")  # a path, and the lines for programs to read
    assert all(len(line) <= 80 for line in text.splitlines() if not any(part in line for part in long))


def computed_in(dtype: str) -> str:
    return "units" if hardware.has_units(CPU, getattr(torch, dtype), "convolution") else "emulated"


@pytest.mark.exhaustive
def test_report_is_one_self_contained_page(demo_output: tuple[str, str]) -> None:
    text, page = demo_output
    assert "report.html" in text
    for level in LEVELS:
        assert re.search(rf"</span>{level} \w+</th>", page)
    for fact in ("16-bit units", torch.__version__, __version__, "halfstep demo --device cpu"):
        assert fact in page
    fetched = re.findall(r"""(?:src|href)\s*=\s*["'](?!#)([^"']*)|url\((?!#)""", page)
    assert not fetched, "the page must need nothing from outside"
    assert "<script" not in page


@pytest.mark.exhaustive
def test_pictures_and_tables_of_the_report_can_be_listened_to(demo_output: tuple[str, str]) -> None:
    _, page = demo_output
    reader = Reader(page)
    drawn = reader.all(role="img")
    assert [tag for tag, _ in drawn] == ["div", "div", "svg", "svg"]  # time, memory, loss, loss scale
    assert all("O2 float16" in (given["aria-label"] or "") for tag, given in drawn if tag == "div")
    for title in ("Loss", "Loss scale"):
        assert page.count(f"<title>{title}</title><desc>") == 1
    headings = [given.get("scope") for tag, given in reader.found if tag == "th"]
    assert set(headings) == {"col", "row"}


@pytest.mark.exhaustive
def test_the_scale_of_float16_moves_and_the_page_says_why(demo_output: tuple[str, str], folder: Path) -> None:
    _, page = demo_output
    runs = json.loads((folder / "results.json").read_text())["runs"]
    scales = {f"{each['level']} {each['dtype']}": each["loss_scales"] for each in runs}
    assert scales["O2 float16"][0] == LOSS_SCALE.init_scale
    assert min(scales["O2 float16"]) < LOSS_SCALE.init_scale
    assert any(after > before for before, after in itertools.pairwise(scales["O2 float16"]))
    assert set(scales["O2 bfloat16"]) == {1.0}
    assert "The demo starts float16 at 2²⁴ and doubles the scale after 20 good steps" in page
    assert "The defaults are 2¹⁶ and 2,000" in page


@pytest.mark.exhaustive
def test_results_are_json_with_their_command_and_machine(demo_output: tuple[str, str], folder: Path) -> None:
    found = json.loads((folder / "results.json").read_text())
    assert found["command"] == "halfstep demo --device cpu --levels O0,O1,O2,O3 --epochs 2 --width 8 --seed 0"
    assert found["machine"]["torch"] == torch.__version__
    assert [len(each["losses"]) for each in found["runs"]] == [2 * EPOCH_STEPS] * 5
    assert all(each["step_seconds"] > 0 for each in found["runs"])
    assert all(each["peak_bytes"] > each["held_bytes"] > 0 for each in found["runs"])


@pytest.mark.exhaustive
def test_each_epoch_is_one_line_in_a_pipe(demo_output: tuple[str, str]) -> None:
    text, _ = demo_output
    names = "O0 float32", "O1 bfloat16", "O2 bfloat16", "O3 bfloat16", "O2 float16"
    losses = ", ".join(rf"{name} \d\.\d{{3}}" for name in names)
    assert re.findall(rf"^epoch (\d) of 2, \d+ s: loss {losses}$", text, re.M) == ["1", "2"]


def test_times_of_a_busy_machine_do_not_cut_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    busy = DemoRun("O2", torch.bfloat16, torch.nn.Linear(1, 1), torch.optim.SGD([torch.zeros(1)]), [1e-4], [2.0**21])
    busy.step_seconds, busy.steps_skipped = [111.1, 0.1] * 20, 1009
    demo._print_table(Console(width=80), [busy], CPU)
    printed = capsys.readouterr().out
    assert "…" not in printed
    assert printed.split()[-1] == "1009"


@pytest.mark.exhaustive
def test_one_level_alone(tmp_path: Path) -> None:
    short = ["--epochs", "1", "--width", "8", "--out", str(tmp_path)]
    text = run("demo", "--device", "cpu", "--levels", "o2", "--dtype", "bfloat16", *short)
    assert re.search(r"^\s*O2\s+bfloat16", text, re.M)
    assert "float16" not in text.replace("bfloat16", "")
    assert "No scale moved." in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "ratio" in text
    assert re.search(r"^epoch 1 of 1, \d+ s: loss O2 bfloat16 \d\.\d{3}$", text, re.M)
    assert "to O2" in text


@pytest.mark.parametrize(("times", "busy"), [([1.0, 1.02] * 20, False), ([1.0, 1.0, 2.0, 2.0] * 10, True)])
def test_times_that_are_not_to_be_trusted(times: list[float], busy: bool) -> None:
    runs = [
        DemoRun(
            "O0",
            torch.float32,
            torch.nn.Linear(1, 1),
            torch.optim.SGD([torch.zeros(1)]),
            losses=[1.0],
            loss_scales=[1.0],
        )
    ]
    runs[0].step_seconds = times
    note = report.busy_note(runs)
    assert bool(note) is busy
    assert runs[0].step_spread == pytest.approx(0.5 if busy else 0.01)
    if busy:
        assert note.startswith("The machine was busy with something else: steps of O0 float32 differ by ±")
    assert f"±{1e3 * runs[0].step_spread:.1f}" in report.summarize(runs, CPU)[1][0][3]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_cuda() -> None:
    assert "torch finds no CUDA device here" in run("demo", "--device", "cuda", exit_code=1)


def test_a_missing_extra_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    text = run("demo", exit_code=1)
    assert "needs scikit-learn" in text
    assert install_line("demo") in " ".join(text.split())


@pytest.mark.exhaustive
def test_a_machine_without_units_is_told_so_and_trains_at_full_width(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hardware, "cpu_units", lambda dtype: [])
    seen: list[DemoSettings] = []
    real = training.train

    def train(settings: DemoSettings, *rest: Any) -> list[DemoRun]:
        seen.append(settings)
        return real(replace(settings, width=8), *rest)

    monkeypatch.setattr(training, "train", train)
    text = run("demo", "--device", "cpu", "--levels", "O0", "--epochs", "1", "--out", str(tmp_path))
    assert "no bfloat16 units" in text
    assert seen[0].width == 64
    assert seen[0].beside is None
    assert "no bfloat16 units" in (tmp_path / "report.html").read_text(encoding="utf-8")


def short_run(level: str = "O2", dtype: torch.dtype = torch.float16) -> DemoRun:
    model = torch.nn.Linear(2, 2)
    result = DemoRun(level, dtype, model, torch.optim.SGD(model.parameters(), lr=0.1))
    result.losses = [2.0, float("nan"), *[1.0] * (EPOCH_STEPS - 2)]
    result.loss_scales = [65536.0, 32768.0, *[32768.0] * (EPOCH_STEPS - 2)]
    result.step_seconds = [0.002] * EPOCH_STEPS
    result.steps_skipped = 1
    return result


def test_skipped_steps_and_a_moving_scale_are_told(tmp_path: Path) -> None:
    header, (row,) = report.summarize([short_run()], CPU)
    told = dict(zip(header, row, strict=True))
    assert told["loss scale"] == "2^15"
    assert told["steps skipped"] == "1"
    assert told["step ms"] == "2.0±0.0"
    settings = DemoSettings(["O2"], CPU, torch.float16, epochs=1)
    report.write_report(tmp_path / "r.html", [short_run()], settings, ["a <note>"])
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "halves at each overflow" in page
    assert "a &lt;note&gt;" in page
    report.write_results(tmp_path / "r.json", [short_run()], settings)
    (result,) = json.loads((tmp_path / "r.json").read_text())["runs"]
    assert result["losses"][:3] == [2.0, None, 1.0]


def test_what_is_emulated_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [short_run("O0", torch.float32), short_run(dtype=torch.bfloat16), short_run()]
    settings = DemoSettings(["O0", "O2"], CPU, torch.bfloat16, epochs=1, beside=torch.float16)
    for units, computed in (([], ["fp32", "emulated", "emulated"]), (["amx"], ["fp32", "units", "emulated"])):
        monkeypatch.setattr(hardware, "cpu_units", lambda dtype, units=units: units)
        header, rows = report.summarize(runs, CPU)
        assert [row[header.index("computed")] for row in rows] == computed
        report.write_report(tmp_path / "r.html", runs, settings)
        assert "Emulated: this device has no 16-bit units" in (tmp_path / "r.html").read_text(encoding="utf-8")


@pytest.mark.exhaustive
def test_levels_of_one_seed_start_alike_and_see_the_same_data() -> None:
    settings = DemoSettings(LEVELS, CPU, torch.bfloat16, epochs=1, width=8)
    runs, again = training.train(settings), training.train(settings)
    for one, other in zip(runs, again, strict=True):
        assert one.losses == other.losses, f"{one.level} is not repeatable"
    first = [r.losses[0] for r in runs]
    assert max(first) - min(first) < 0.02 * first[0]
    assert runs[2].held_bytes < runs[0].held_bytes * 1.05
    assert runs[3].held_bytes < runs[0].held_bytes * 0.6


@pytest.mark.exhaustive
def test_16_bit_levels_learn_as_well_as_fp32() -> None:
    runs = training.train(DemoSettings(["O0", "O1", "O2"], CPU, torch.bfloat16, epochs=4, seed=0, width=16))
    accuracy = {result.level: 100 * result.test_accuracy for result in runs}
    assert accuracy["O0"] > 95
    assert min(accuracy.values()) > accuracy["O0"] - 1, accuracy


@pytest.mark.exhaustive
def test_demo_leaves_amp_usable(demo_output: tuple[str, str]) -> None:
    model = torch.nn.Linear(4, 4)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O0", verbosity=0)
    scaled_backward(model(torch.ones(1, 4)).sum(), optimizer)
    before = model.weight.detach().clone()
    optimizer.step()
    assert torch.equal(model.weight, before - 0.1)
