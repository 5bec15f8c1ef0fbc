"""``halfstep memory``: the table of bytes a parameter."""

from __future__ import annotations

import pytest

for needed in ("click", "rich"):
    pytest.importorskip(needed)  # the GPU machine has neither

from click.testing import CliRunner

from halfstep.cli.app import app
from halfstep.diagnostics.findings.memory import OPTIMIZERS


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["memory", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_every_optimizer_is_in_the_table() -> None:
    text = run()
    assert all(kept.name in text for kept in OPTIMIZERS)
    assert "GiB" not in text


@pytest.mark.parametrize("number", ["7e9", "7b", "7,000M", "7_000_000_000"])
def test_a_number_of_parameters_adds_gib_and_a_name_leaves_others_out(number: str) -> None:
    text = run("--params", number, "--optimizer", "fusedadam")
    assert "O2 bfloat16      2      2     8    2  14  91.3" in text
    assert "RMSprop" not in text
