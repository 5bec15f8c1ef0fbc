"""``halfstep oplists``: the table that it prints is that of ``oplists.entries``."""

from __future__ import annotations

import re

import pytest

for needed in ("click", "rich"):
    pytest.importorskip(needed)  # the GPU machine has neither

from click.testing import CliRunner

from halfstep.cli.app import app
from halfstep.oplists import BANNED, RULES, OpLists, entries


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    monkeypatch.setenv("COLUMNS", "200")
    result = CliRunner().invoke(app, ["oplists", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def rows(output: str) -> list[tuple[str, ...]]:
    """The cells of the lines of the table, without its head."""
    cells = [[cell.strip() for cell in re.split("[│|┃]", line)[1:-1]] for line in output.splitlines()]
    return [tuple(line) for line in cells if len(line) == 5 and line[0] != "op"]


def test_all_ops_on_a_list_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    output = run(monkeypatch)
    assert rows(output) == [tuple(entry) for entry in entries()]
    for rule in {entry.rule for entry in entries()}:
        assert f"{rule}: {RULES[rule]}." in output
    assert "free:" not in output, "no op on a list is free"


@pytest.mark.parametrize("arguments", [["oplists"], ["memory", "--params", "7e9"]], ids=" ".join)
def test_a_table_is_not_cut_where_the_terminal_is_narrow(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert "…" not in CliRunner().invoke(app, arguments).output


def test_only_the_ops_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    output = run(monkeypatch, "torch.nn.functional.softmax", "aten::relu", "reduce_sum", "--device", "cuda")
    assert rows(output) == [tuple(entry) for entry in entries(["softmax", "relu", "sum"], device="cuda")]
    assert "torch.autocast on cuda" in output


def test_the_reason_of_a_ban_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "binary_cross_entropy"
    assert f"{name}: {BANNED[name]}" in " ".join(run(monkeypatch, name).split())
    assert BANNED[name] not in " ".join(run(monkeypatch, "softmax").split())


@pytest.mark.parametrize("level", ["O1", "O2", "OD"])
def test_lists_of_another_level_and_of_one_s_own(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--level", level, "--white", "exp", "--white", "log", "--black", "matmul", "--wide", "linear"]
    lists = OpLists.custom(["exp", "log"], ["matmul"], wide=["linear"], level=level)
    ops = ["exp", "log", "matmul", "linear", "softmax"]
    assert rows(run(monkeypatch, *ops, *options)) == [tuple(entry) for entry in entries(ops, lists=lists)]
