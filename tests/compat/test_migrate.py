"""``halfstep migrate``: before and after, what it leaves and says, and that what it writes runs."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from click.testing import CliRunner

from halfstep.cli.migrate import command, migrate
from tests.support.python import python


def rows() -> Iterator[tuple[str, str]]:
    """The scripts of ``migrate.txt``: before, an arrow, after, and a line of dashes."""
    for block in Path(__file__).with_name("migrate.txt").read_text(encoding="utf-8").split("----\n"):
        before, arrow, after = block.lstrip("\n").partition("=>\n")
        if arrow:
            yield before, after


IN_BYTES = [  # what an editor may change
    ("\ufefffrom apex import amp\n", "\ufefffrom halfstep import amp\n"),
    (
        "from apex import (\n\tamp,  # casts\n\tparallel,\n)\r\nx = 'é'; m = amp.initialize((m), *a, **k)  # é\r\n",
        "from halfstep import (\n\tamp,  # casts\n\tparallel,\n)\r\n"
        "x = 'é'; m = amp.initialize((m), *a, **k, dtype=\"float16\")  # é\r\n",
    ),
]


@pytest.mark.parametrize(("before", "after"), [*rows(), *IN_BYTES])
def test_to_halfstep(before: str, after: str) -> None:
    found = migrate(before)
    assert found.after == after
    again = migrate(found.after)
    assert again.after == after, "a second time changes nothing"
    assert not any("not rewritten" in text for _, text in found.problems)


@pytest.mark.parametrize(
    ("code", "line", "said"),
    [
        ("\nfrom apex import transformer\n", 2, "from apex import transformer"),
        ("from apex.contrib.fmha import FMHAFun\n", 1, "FMHAFun"),
        ("import apex.transformer\n", 1, "import apex.transformer"),
        ("from apex.contrib.optimizers import DistributedFusedAdam\n", 1, "DistributedFusedAdam"),
        ("import apex\n\napex.transformer.parallel_state.get()\n", 3, "transformer"),
        ("from apex.transformer import *\n", 1, "transformer"),
        ("from apex import amp\n\namp.unheard_of()\n", 3, "apex.amp.unheard_of"),
        ("from apex import amp\nhasattr(amp, 'x')\nbuild(model, amp=amp)\n", 3, 'add dtype="float16" to its'),
        ("from apex import amp\n\nmixed = amp\n", 3, "amp is handed on here"),
        ("import amp_C\n\namp_C.unheard_of\n", 3, "amp_C.unheard_of"),
        ("import importlib\nhas = importlib.util.find_spec('apex') is not None\n", 2, "asks for Apex by a string"),
    ],
)
def test_what_is_left_is_named(code: str, line: int, said: str) -> None:
    found = migrate(code)
    assert [number for number, _ in found.problems] == [line]
    assert said in found.problems[0][1]


def test_what_would_not_resolve_is_not_written() -> None:
    """One import cannot be rewritten, and the expressions of another module hang on it."""
    source = "import apex.transformer\nx = apex.amp.initialize\n"
    found = migrate(source)
    assert found.after == source
    assert (2, "not rewritten: halfstep would not be found") in found.problems


def test_mentions_are_listed() -> None:
    source = '"""Uses Apex.\n\nNVIDIA\'s apex.\n"""\nx = 1  # with apex\ny = "apex/amp"\n'
    source += "from apex import amp\nuse_apex = 1\n"
    found = migrate(source)
    assert found.problems == []
    assert found.mentions == [*((1, '"""Uses Apex.'), (3, "NVIDIA's apex."), (5, "# with apex"), (6, 'y = "apex/amp"'))]


# ---- the command


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(command, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_it_shows_first_and_writes_when_told(tmp_path: Path) -> None:
    for name, text in (("a.py", "from apex import amp\n"), ("sub/b.py", "x = 1\n"), (".hidden/c.py", "import apex\n")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "a.py").chmod(0o755)
    code, said = run(str(tmp_path))
    assert code == 0
    assert "-from apex import amp" in said
    assert "+from halfstep import amp" in said
    assert "1 file would change, 0 places left" in said
    assert (tmp_path / "a.py").read_text() == "from apex import amp\n"
    code, said = run(str(tmp_path), "--write")
    assert "1 file changed" in said
    assert (tmp_path / "a.py").read_text() == "from halfstep import amp\n"
    assert (tmp_path / "a.py").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / ".hidden/c.py").read_text() == "import apex\n"
    assert run(str(tmp_path))[1].strip() == "0 files would change, 0 places left"


def test_only_files_are_read_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "gone.py").symlink_to(tmp_path / "nothing")
    assert run(str(tmp_path)) == (0, "0 files would change, 0 places left\n")


def test_what_cannot_be_written_is_found_before_anything_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.py").write_text("from apex import amp\n")

    def read_only(dir: Path) -> object:
        if dir.name == "b":
            raise OSError(errno.EROFS, "Read-only file system")
        return nullcontext()

    monkeypatch.setattr("tempfile.TemporaryFile", read_only)
    code, said = run(str(tmp_path), "--write")
    assert code == 1
    assert "b/x.py cannot be written: Read-only file system" in said.replace("\n", "")
    assert (tmp_path / "a/x.py").read_text() == "from apex import amp\n"


def test_what_is_left_shows_in_the_exit_status(tmp_path: Path) -> None:
    script, broken = tmp_path / "a.py", tmp_path / "b.py"
    script.write_text("from apex import transformer\n")
    broken.write_text("import apex\nprint 'python 2'\n")
    code, said = run(str(script), str(broken), "--write")
    assert code == 1
    assert "halfstep has no such name" in said
    assert "not Python that can be read" in said
    assert broken.read_text() == "import apex\nprint 'python 2'\n"


def test_mentions_show_and_are_no_failure(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("# faster with apex\n")
    code, said = run(str(tmp_path))
    assert code == 0
    assert "a.py:1: mentions Apex: # faster with apex" in said
    assert "0 files would change, 0 places left, 1 mention" in said


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_all_files(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("from apex import amp\n")
    chmod = os.chmod

    def failing(name: str, mode: int) -> None:
        if ".b.py" in name:
            raise error
        chmod(name, mode)

    monkeypatch.setattr("os.chmod", failing)
    result = CliRunner().invoke(command, [str(tmp_path), "--write"])
    assert result.exit_code == 1
    assert ("b.py cannot be written: No space left on device. No file is changed." in result.output) is isinstance(
        error, OSError
    )
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(
        ("a.py", "b.py"), "from apex import amp\n"
    )


def test_all_files_are_written_before_any_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("from apex import amp\n")

    def closed(*args: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")  # as where `head -1` has ended

    monkeypatch.setattr("halfstep.cli.migrate._show", closed)
    assert CliRunner().invoke(command, [str(tmp_path), "--write"]).exit_code == 1
    assert {path.read_text() for path in tmp_path.iterdir()} == {"from halfstep import amp\n"}


@pytest.mark.parametrize(
    "before",
    [
        b"# -*- coding: latin-1 -*-\nfrom apex import amp  # caf\xe9\n",
        b"from apex import amp\r\nx = 1\r\n",
        b"\xef\xbb\xbffrom apex import amp\n",
        b"from apex import amp\nx = 1\r\ny = '\x0c'",
    ],
    ids=["latin-1", "CRLF", "byte order mark", "mixed ends"],
)
def test_a_file_keeps_its_encoding_and_its_ends_of_lines(before: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(before)
    assert run(str(tmp_path))[0] == 0
    code, said = run(str(tmp_path), "--write")
    assert code == 0, said
    assert (tmp_path / "a.py").read_bytes() == before.replace(b"apex", b"halfstep")


def test_a_file_and_a_link_to_it_are_one(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code/real.py").write_text("from apex import amp\n")
    (tmp_path / "code/a link.py").symlink_to("real.py")
    (tmp_path / "code/loop").symlink_to(tmp_path)
    (tmp_path / "other.py").symlink_to("code/real.py")
    assert "1 file would change" in run(str(tmp_path), str(tmp_path / "code"))[1]
    assert "1 file changed" in run(str(tmp_path / "other.py"), "--write")[1]
    assert (tmp_path / "other.py").is_symlink()
    assert (tmp_path / "code/real.py").read_text() == "from halfstep import amp\n"


def test_a_notebook_is_named_and_not_rewritten(tmp_path: Path) -> None:
    (tmp_path / "a.ipynb").write_text('{"source": "from apex import amp"}')
    code, said = run(str(tmp_path), "--write")
    assert (code, "a.ipynb:1: mentions Apex: a notebook, which is not rewritten" in said) == (0, True)
    code, said = run(str(tmp_path / "a.ipynb"))
    assert (code, "`jupyter nbconvert --to script`" in " ".join(said.split())) == (2, True)


def test_what_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret.py").touch()
    (tmp_path / "old.py").write_text("import apex\nprint 'python 2'\n")

    def refused(path: Path) -> bytes:
        if path.name == "secret.py":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        with path.open("rb") as file:
            return file.read()

    monkeypatch.setattr(Path, "read_bytes", refused)
    code, said = run(str(tmp_path))
    assert code == 1
    assert "secret.py: cannot be read: Permission denied" in said
    assert "old.py: not Python that can be read: Missing parentheses" in said
    assert "(line 2)" in said
    assert "2 places left" in said


SCRIPT = """\
import torch
import torch.nn as nn
from apex import amp
from apex.parallel import convert_syncbn_model

torch.manual_seed(0)
model = convert_syncbn_model(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
x = torch.randn(32, 8)
for step in range(20):
    loss = (model(x).squeeze(1) - x.sum(1)).square().mean()
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    print(f"{loss.item():.6f}")
"""


def losses_of(*arguments: str) -> list[float]:
    done = python(*arguments, quiet=True)
    assert done.returncode == 0, done.stderr
    return list(map(float, done.stdout.split()))


@pytest.mark.exhaustive
def test_what_it_writes_does_the_same(tmp_path: Path) -> None:
    original, migrated = tmp_path / "original.py", tmp_path / "migrated.py"
    original.write_text(SCRIPT)
    migrated.write_text(migrate(SCRIPT).after)
    losses = losses_of("-m", "halfstep", "run", str(original))
    assert losses_of(str(migrated)) == losses
    assert losses[-1] < losses[0]
