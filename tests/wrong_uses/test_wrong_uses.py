"""Every wrong use is refused at once, in words that say what was given, what is allowed and what to do.

Nothing has changed afterwards: neither weights, gradients, hooks, groups and state nor scales and the casts of the
process. The tables are in the files whose names begin with ``rows``.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

from halfstep.cli.app import app
from halfstep.core.errors import HalfstepError

from . import rows_amp, rows_faces, rows_initialize, rows_optimizers, rows_scalers, rows_static, rows_switches
from .worlds import Wrong, same, snapshot

TABLES = (rows_initialize, rows_amp, rows_scalers, rows_optimizers, rows_static, rows_faces, rows_switches)
ROWS = [row for table in TABLES for row in table.ROWS]


@pytest.mark.parametrize("row", ROWS, ids=[row.name.replace("::", ":") for row in ROWS])
def test_a_wrong_use_is_refused_in_words_that_help(row: Wrong, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    world = row.setup()
    before = snapshot(world)
    with pytest.raises(row.error) as raised:
        row.use(world)
    message = str(raised.value)
    assert isinstance(raised.value, HalfstepError)
    assert [words for words in row.words if words not in message] == [], message
    after = snapshot(world)
    assert [name for name in before if not same(before[name], after[name])] == []
    if hasattr(world, "handle"):
        world.handle._deactivate()  # it has a hook on every module


def test_the_table_is_long_and_has_no_row_twice() -> None:
    assert len(ROWS) >= 350
    assert [name for name, count in Counter(row.name for row in ROWS).items() if count > 1] == []


COMMANDS = {
    "an unknown command": (["trian"], ("No such command 'trian'",)),
    "run without a script": (["run"], ("Missing argument 'SCRIPT'",)),
    "run a script that is not there": (["run", "nowhere.py"], ("nowhere.py", "does not exist")),
    "run with a wrong dtype": (["run", "--dtype", "int8", "x.py"], ("'int8'", "'float16', 'bfloat16'")),
    "run on a device there is no shim for": (["run", "--device", "tpu", "x.py"], ("'tpu'", "'cpu'")),
    "oplists of an unknown op": (["oplists", "sofmax"], ("'sofmax'", "Did you mean 'softmax'")),
    "oplists of an unknown level": (["oplists", "--level", "O7"], ("'O7'", "'O1', 'O2', 'OD'")),
    "oplists with an op on both lists": (["oplists", "--white", "exp", "--black", "exp"], ("exp", "leave each on one")),
    "demo at an unknown level": (["demo", "--levels", "O9"], ("'O9'", "O0,O1,O2,O3")),
    "demo at a level twice": (["demo", "--levels", "O1,O1"], ("'O1,O1'", "each once")),
    "demo without epochs": (["demo", "--epochs", "0"], ("0 is not in the range",)),
    "demo into a folder that cannot be made": (["demo", "--out", "x.py/report"], ("cannot be written", "x.py")),
    "doctor with a device and no script": (["doctor", "--device", "cpu"], ("--device goes with a SCRIPT",)),
    "run with two outputs in one file": (
        ["run", "--report", "a.html", "--numerics", "./a.html", "x.py"],
        ("--report and --numerics", "a.html"),
    ),
    "doctor of a script that is not there": (["doctor", "nowhere.py"], ("nowhere.py", "does not exist")),
    "migrate nothing": (["migrate"], ("Missing argument 'PATHS...'",)),
    "migrate a path that is not there": (["migrate", "nowhere.py"], ("nowhere.py", "does not exist")),
    "migrate to something else": (["migrate", "--to", "jax", "."], ("'jax'", "'halfstep', 'torch'")),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_wrong_command_is_refused_before_it_does_anything(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    arguments, words = COMMANDS[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text("raise SystemExit('it ran')")
    done = CliRunner().invoke(app, arguments)
    said = " ".join(done.output.split())
    assert done.exit_code in (1, 2)
    assert "it ran" not in said
    assert [each for each in words if each not in said] == [], said
    assert [path.name for path in tmp_path.iterdir()] == ["x.py"]
