"""``halfstep compare``: the table on stdout, and a page."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from halfstep.cli.compare import command
from halfstep.numerics import Monitor


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs of one model, of which the second one adds noise in its second layer."""
    monkeypatch.chdir(tmp_path)
    for name, noise in (("a", 0.0), ("b", 0.3)):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Linear(64, 64), torch.nn.Tanh())
        x = torch.randn(32, 4)
        with torch.no_grad():
            model[1].weight += noise * torch.randn(64, 64)
        with Monitor(model, every=1) as monitor:
            model(x)
        monitor.save(tmp_path / f"{name}.jsonl")
    return tmp_path


def test_the_table_is_printed_and_the_status_is_0(saved: Path) -> None:
    result = CliRunner().invoke(command, ["a.jsonl", "b.jsonl"])
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0].startswith("b.jsonl against a.jsonl: ")
    assert next(line for line in lines if line.startswith("first divergence")).startswith("first divergence: 1: output")


def test_a_page_is_written(saved: Path) -> None:
    result = CliRunner().invoke(command, ["a.jsonl", "b.jsonl", "--html", "pages/p.html"])
    assert result.exit_code == 0
    page = (saved / "pages" / "p.html").read_text(encoding="utf-8")
    assert "halfstep compare a.jsonl b.jsonl --html=pages/p.html" in page
    assert "First divergence: 1: output" in page
