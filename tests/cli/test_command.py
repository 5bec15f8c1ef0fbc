"""``halfstep`` as a command: its help, its version, completion in a shell, and colours."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

for needed in ("click", "rich"):
    pytest.importorskip(needed)  # the GPU machine has neither

import click
from click.testing import CliRunner

from halfstep import __version__
from halfstep.cli.app import SUBCOMMANDS, app

# The program as it is installed; the last line that it prints says whether it has imported torch.
PROGRAM = """
import atexit, sys
sys.argv = ["halfstep", *sys.argv[1:]]
atexit.register(lambda: print(f"torch: {'torch' in sys.modules}"))
from halfstep.cli import main
main()
"""
COLOUR = re.compile(r"\x1b\[(?:\d+;)*[349]\d(?:;\d+)*m")


def shell(*args: str, **environment: str) -> tuple[str, bool]:
    """What the program prints, and whether it has imported torch."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *args],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr
    output, _, last = done.stdout.rstrip("\n").rpartition("\n")
    return output, last == "torch: True"


@pytest.mark.parametrize(
    "args", [["--help"], ["-h"], ["--version"], *([name, "-h"] for name in SUBCOMMANDS)], ids=" ".join
)
def test_help_and_version_need_no_torch(args: list[str]) -> None:
    output, has_torch = shell(*args)
    assert output.startswith("Usage: halfstep") or output == f"halfstep, version {__version__}"
    assert not has_torch


@pytest.mark.parametrize("argument", ["-h", "--version"])
def test_python_m_halfstep_is_the_command(argument: str) -> None:
    done = subprocess.run([sys.executable, "-m", "halfstep", argument], capture_output=True, text=True, check=True)
    assert done.stdout == shell(argument)[0] + "\n"


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_option_says_what_it_does(name: str) -> None:
    command = app.get_command(click.Context(app), name)
    assert command is not None
    shown = [option for option in command.params if isinstance(option, click.Option) and not option.hidden]
    assert [option.name for option in shown if not option.help] == []


@pytest.mark.parametrize("name", ["", *SUBCOMMANDS])
def test_every_help_ends_in_an_example_that_the_command_understands(name: str) -> None:
    last = CliRunner().invoke(app, [*name.split(), "--help"]).output.splitlines()[-1]
    assert last.startswith(f"  Example: halfstep {name}")
    _, command, args = app.resolve_command(click.Context(app), last.split()[2:])
    assert command is not None
    with suppress(click.BadParameter):  # its files are not there
        command.make_context(command.name, list(args), obj=[])


@pytest.mark.parametrize(
    ("words", "found"),
    [("halfstep do", {"doctor"}), ("halfstep ", set(SUBCOMMANDS)), ("halfstep demo --le", {"--levels"})],
)
@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_shells_complete_commands_and_options_without_torch(name: str, words: str, found: set[str]) -> None:
    *_, last = split = words.split(" ")
    output, has_torch = shell(
        _HALFSTEP_COMPLETE=f"{name}_complete",
        COMP_WORDS=words,
        COMP_CWORD=last if name == "fish" else str(len(split) - 1),
    )
    assert found <= set(re.split(r"[,\n\t]", output))
    assert not has_torch


@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_the_documented_line_gives_a_script_for_the_shell(name: str) -> None:
    output, _ = shell(_HALFSTEP_COMPLETE=f"{name}_source")
    assert f"_HALFSTEP_COMPLETE={name}_complete" in output


def test_no_color_is_obeyed_and_a_pipe_gets_no_escapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "old.py").write_text("from apex import amp\n")
    coloured = []
    for environment in ({}, {"FORCE_COLOR": "1"}, {"FORCE_COLOR": "1", "NO_COLOR": "1"}):
        for name in ("FORCE_COLOR", "NO_COLOR"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("TERM", "xterm-256color")
        output = CliRunner().invoke(app, ["migrate", str(tmp_path / "old.py")]).output
        coloured.append((bool(COLOUR.search(output)), "\x1b" in output))
    assert coloured[0] == (False, False)
    assert coloured[1] == (True, True)
    assert coloured[2][0] is False
