"""Every Python example in README and docs runs as it stands, top to bottom in one namespace a page."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
from pathlib import Path

import pytest

from tests.support.backends import needs_compiler
from tests.support.python import python

ROOT = Path(__file__).resolve().parents[2]
HOW_TO = sorted((ROOT / "docs/how-to").glob("*.md"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *HOW_TO]
FENCED = re.compile(r"^```python\n(.*?)^```(?:\n\n```text\n(.*?)^```)?", re.M | re.S)
WITH_OUTPUT = [
    ROOT / "docs/tutorial.md",
    ROOT / "docs/from-torch-amp.md",
    *sorted((ROOT / "docs").glob("troubleshooting*.md")),
    *HOW_TO,
]
"""There a text block right after a Python block is its whole output."""
NUMBER = re.compile(r"\b\d[\d,]*\.?\d*(?:e[-+]?\d+)?")


def assert_shown(shown: str, printed: str) -> None:
    """The words are the same, and the numbers are near: another machine rounds in other places."""
    assert NUMBER.sub("0", printed).split() == NUMBER.sub("0", shown).split()
    for number, expected in zip(NUMBER.findall(printed), NUMBER.findall(shown), strict=True):
        near = math.isclose(float(number.replace(",", "")), float(expected.replace(",", "")), rel_tol=0.25)
        assert near, f"{number} was printed, and the page shows {expected}"


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torchrun sets for a script on one process."""
    names = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "localhost", "MASTER_PORT": 0}
    for name, value in names.items():
        monkeypatch.setenv(name, str(value))


SHOWS_FUSED_STATE = {"memory", "troubleshooting", "troubleshooting-weights"}
"""Pages whose output counts what only a fused step has in its state."""


def marks_of(page: Path) -> list[pytest.MarkDecorator]:
    long = page in HOW_TO or page.stem in ("graph-mode", "model", "tutorial", "when-a-run-goes-wrong")
    return [needs_compiler] * (page.stem in SHOWS_FUSED_STATE) + [pytest.mark.exhaustive] * long


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=marks_of(page), id=page.stem) for page in PAGES if FENCED.search(page.read_text())],
)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = page.read_text()
    namespace: dict[str, object] = {}
    for block in FENCED.finditer(text):
        lines_before = text.count("\n", 0, block.start(1))
        code = compile("\n" * lines_before + block[1], str(page), "exec")  # so that a traceback names the page's line
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        if block[2] is not None and page in WITH_OUTPUT:
            assert_shown(block[2], printed.getvalue())


@pytest.mark.parametrize("printed", ["loss 0.20", "loss 0.1 and", "lost 0.1"])
def test_other_output_than_a_page_shows_is_noticed(printed: str) -> None:
    assert_shown("loss 0.10", "loss 0.11")
    with pytest.raises(AssertionError):
        assert_shown("loss 0.10", printed)


@pytest.mark.exhaustive
def test_the_notebook_runs_and_prints_what_it_shows() -> None:
    namespace: dict[str, object] = {}
    for cell in json.loads((ROOT / "examples/diagnose.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            with contextlib.redirect_stdout(printed := io.StringIO()):
                exec("".join(cell["source"]), namespace)
            found = printed.getvalue().replace("and HS111 note: see findings\n", "")  # on CPUs without float16 units
            assert_shown("".join("".join(output["text"]) for output in cell["outputs"]), found)


@pytest.mark.exhaustive
def test_a_script_of_2019_prints_what_its_page_shows() -> None:
    done = python("-m", "halfstep", "run", "--device", "cpu", str(ROOT / "examples/simple/of_2019.py"))
    assert_shown((ROOT / "docs/from-2019.md").read_text().split("```text\n")[1].split("```")[0], done.stdout)
