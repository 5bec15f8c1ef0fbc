"""``halfstep memory``: the table of bytes a parameter."""

from __future__ import annotations

import pytest

for needed in ("click", "rich"):
    pytest.importorskip(needed)  # the GPU machine has neither

from click.testing import CliRunner

from halfstep.cli.app import app
from halfstep.diagnostics.findings.memory import OPTIMIZERS


def run(*arguments: str, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, ["memory", *arguments])
    assert result.exit_code == exit_code, result.output
    return result.output


def test_every_optimizer_is_in_the_table() -> None:
    text = run()
    assert all(kept.name in text for kept in OPTIMIZERS)
    assert "GiB" not in text


def test_a_number_of_parameters_adds_gib_and_a_name_leaves_others_out() -> None:
    text = run("--params", "7e9", "--optimizer", "fusedadam")
    assert "O2 bfloat16      2      2     8    4  16 104.3" in text
    assert "RMSprop" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--params", "-1"], "--params: -1 must be a number of parameters above 0, such as 7e9"),
        (["--optimizer", "Lion"], "No optimizer of the table has 'Lion' in its name"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], message: str) -> None:
    assert message in run(*arguments, exit_code=2)
