"""The C++ compiler of the machine: missing, broken, old, slow; and the libraries that are kept of it."""

from __future__ import annotations

import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from halfstep import kernels, optimizers
from halfstep.core import files
from halfstep.kernels.backends import compiler, cpp

CACHED = (
    *(compiler.available, compiler.build, compiler._compiler, compiler._processor),
    *(cpp._library_call, files._say_once, files._temporary_directory),
)
SOURCE = 'extern "C" int answer() { return 42; }'
needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")

Wrapped = Callable[[str], str]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What is known about the compiler is forgotten before and after each test."""
    for function in CACHED:
        function.cache_clear()
    folder = tmp_path / "home" / "cache"
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(compiler, "_gave_up", False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("HALFSTEP_CACHE_DIR", str(folder))
    monkeypatch.delenv("HALFSTEP_BACKEND", raising=False)
    yield folder
    for function in CACHED:
        function.cache_clear()


@pytest.fixture
def wrapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Wrapped:
    """Make CXX a compiler that runs some lines of shell before the real one."""

    def make(lines: str) -> str:
        path = tmp_path / "wrapped-c++"
        path.write_text(f'#!/bin/sh\n{lines}\nexec c++ "$@"\n')
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))
        return str(path)

    return make


def step() -> list[float]:
    """What one multi-tensor call computes on the backend of the CPU."""
    x, out = torch.tensor([1.0, 2.0]), torch.zeros(2)
    kernels.scale([x], [out], 3.0)
    return out.tolist()


def test_without_a_compiler_the_torch_backend_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with caplog.at_level(logging.WARNING, logger="halfstep"):
        assert [kernels.backend_for("cpu") for _ in range(2)] == ["torch", "torch"]
        with kernels.backend("compiled"):
            assert kernels.backend_for("cpu") == "torch"
            assert step() == [3.0, 6.0]
    (record,) = caplog.records
    assert record.getMessage().startswith("No C++ compiler found (CXX, c++, g++, clang++)")


@needs_compiler
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'fatal: no licence' >&2; echo more >&2; exit 1", "fatal: no licence"),
        ("exit 3", "exit status 3"),
        ("while [ $# -gt 1 ]; do shift; done; [ $1 = - ] || echo rubbish > $1; exit 0", "probe-"),
    ],
    ids=["says why", "says nothing", "writes no library"],
)
def test_with_a_compiler_that_fails_the_torch_backend_serves(
    script: str, reason: str, wrapped: Wrapped, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = wrapped(script)
    with caplog.at_level(logging.WARNING, logger="halfstep"):
        assert [kernels.backend_for("cpu") for _ in range(2)] == ["torch", "torch"]
        assert step() == [3.0, 6.0]
    (record,) = caplog.records
    message = record.getMessage()
    assert message.startswith(f"{path} cannot build a library here (")
    assert reason in message
    assert "more" not in message, "one line of what the compiler says is enough"
    assert not list(cache.glob("*.tmp")), "nothing unfinished is left"


@pytest.mark.parametrize(
    ("error", "reason"),
    [(OSError(), "OSError"), (subprocess.TimeoutExpired("c++", 120), "Command 'c++' timed out after 120 seconds")],
    ids=["an error without words", "a compiler that hangs"],
)
def test_the_reason_is_given_whatever_the_error(
    error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def build(name: str, source: str) -> None:
        raise error

    monkeypatch.setattr(compiler, "build", build)
    monkeypatch.setattr(compiler, "_compiler", lambda: "c++")
    with caplog.at_level(logging.WARNING, logger="halfstep"):
        assert not compiler.available()
    assert f"c++ cannot build a library here ({reason})" in caplog.text


@pytest.mark.exhaustive
@needs_compiler
@pytest.mark.parametrize("refused", ["-fopenmp", "-march=native"])
def test_a_flag_that_the_compiler_does_not_know_is_left_out(refused: str, wrapped: Wrapped) -> None:
    path = wrapped(f'for flag in "$@"; do if [ "$flag" = "{refused}" ]; then exit 1; fi; done')
    assert compiler._flags(path) == tuple(flag for flag in compiler._flags("c++") if flag != refused)
    assert compiler.build("answer", SOURCE).answer() == 42


@needs_compiler
def test_the_variable_cxx_comes_first(wrapped: Wrapped, monkeypatch: pytest.MonkeyPatch) -> None:
    path = wrapped("")
    assert compiler._compiler() == path
    compiler._compiler.cache_clear()
    monkeypatch.delenv("CXX")
    assert compiler._compiler() == shutil.which("c++")


@pytest.mark.exhaustive
@needs_compiler
def test_a_library_is_built_once_and_then_loaded(wrapped: Wrapped, tmp_path: Path, cache: Path) -> None:
    log = tmp_path / "calls"
    wrapped(f'case "$*" in *-shared*) echo "$*" >> {log};; esac')
    assert compiler.build("answer", SOURCE).answer() == 42
    compiler.build.cache_clear()  # as in a new process
    assert compiler.build("answer", SOURCE).answer() == 42
    assert len(log.read_text().splitlines()) == 1
    assert [file.name.startswith("answer-") for file in cache.iterdir()] == [True]


@pytest.mark.exhaustive
@needs_compiler
def test_processors_have_libraries_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    info = tmp_path / "cpuinfo"
    monkeypatch.setattr(compiler, "Path", lambda name: info)
    found = []
    for text in ("model: x\nflags : sse\n", "Features : neon\n", "model: x\n", None):
        if text is None:
            info.unlink()
        else:
            info.write_text(text)
        compiler._processor.cache_clear()
        compiler.build.cache_clear()
        found.append(compiler._processor())
        assert compiler.build("answer", SOURCE).answer() == 42
    assert found[:2] == ["flags : sse", "Features : neon"]
    assert found[2] == found[3], "where nothing is known, the kind of machine has to do"
    assert platform.machine() in found[2]
    assert len(list(cache.iterdir())) == 3


# ---- what is kept: only whole files, of this user, where nobody else can write


def in_a_new_process() -> int:
    """The answer of the library, as a process gets it that has built and loaded nothing."""
    compiler.build.cache_clear()
    answer: int = compiler.build("answer", SOURCE).answer()
    return answer


def kept(folder: Path) -> list[Path]:
    return sorted(folder.glob("answer-*.so"))


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "one bit": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
}


@needs_compiler
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_is_built_anew(damage: str, cache: Path, tmp_path: Path) -> None:
    assert in_a_new_process() == 42
    (library,) = kept(cache)
    whole = library.read_bytes()
    library.rename(tmp_path / "loaded")  # a library that is in use must not change
    library.write_bytes(DAMAGES[damage](whole))
    assert in_a_new_process() == 42
    (library,) = kept(cache)
    assert library.read_bytes() == whole


@needs_compiler
def test_a_library_has_the_users_rights_only(cache: Path) -> None:
    cache.parent.mkdir()
    before = os.umask(0)
    try:
        in_a_new_process()
    finally:
        os.umask(before)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in kept(cache)] == [0o700]


HOSTILE = 'extern "C" int answer() { return 666; }'


def others_write(cache: Path) -> None:
    cache.chmod(0o777)


def others_write_to_the_library(cache: Path) -> None:
    kept(cache)[0].chmod(0o666)


def others_rename_above(cache: Path) -> None:
    cache.parent.chmod(0o777)


def owned_by_another(cache: Path) -> None:
    os.chown(cache, 65534, 65534)


def a_library_of_another(cache: Path) -> None:
    os.chown(kept(cache)[0], 65534, 65534)


def a_link_to_a_library(cache: Path) -> None:
    (library,) = kept(cache)
    shutil.move(library, cache.parent / "elsewhere")
    library.symlink_to(cache.parent / "elsewhere")


DOORS = [
    others_write,
    others_write_to_the_library,
    others_rename_above,
    a_link_to_a_library,
    *(
        pytest.param(door, marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away"))
        for door in (owned_by_another, a_library_of_another)
    ),
]


@needs_compiler
@pytest.mark.parametrize("door", DOORS)
def test_what_somebody_else_may_have_written_is_not_loaded(
    door: Callable[[Path], None], cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert in_a_new_process() == 42
    (library,) = kept(cache)
    library.unlink()
    subprocess.run(["c++", "-shared", "-fPIC", "-x", "c++", "-", "-o", library], input=HOSTILE, text=True, check=True)
    library.chmod(0o700)
    library.rename(files._place(cache, library.stem.rpartition("-")[0], ".so", library))
    assert in_a_new_process() == 666, "in the folder of this user it would be loaded"
    (library,) = kept(cache)
    shutil.copy(library, tmp_path / "copy")  # another file than the one that this process has loaded
    library.unlink()
    shutil.move(tmp_path / "copy", library)
    door(cache)
    with caplog.at_level(logging.WARNING, logger="halfstep"):
        assert in_a_new_process() == 42
        assert in_a_new_process() == 42
    refused = door in (others_write, others_rename_above, owned_by_another)
    assert [str(cache) in message for message in caplog.messages] == [True] * refused
    assert len(kept(tmp_path / "temporary" / f"halfstep-{os.geteuid()}")) == refused


@needs_compiler
def test_a_folder_that_somebody_else_made_among_the_temporary_files_is_not_used(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a file").touch()
    monkeypatch.setenv("HALFSTEP_CACHE_DIR", str(tmp_path / "a file"))
    theirs = tmp_path / "temporary" / f"halfstep-{os.geteuid()}"
    theirs.mkdir()
    theirs.chmod(0o777)
    assert in_a_new_process() == 42
    assert kept(theirs) == []
    theirs.rmdir()
    theirs.symlink_to(tmp_path)
    assert in_a_new_process() == 42
    assert kept(tmp_path) == []
    own = files._temporary_directory()
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    assert len(kept(own)) == 1


def refuses_writes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a folder read-only, for root too."""
    make = tempfile.mkstemp

    def mkstemp(suffix: str, prefix: str, place: Path) -> tuple[int, str]:
        if place == folder:
            raise PermissionError(13, "Permission denied")
        return make(suffix, prefix, place)

    monkeypatch.setattr(tempfile, "mkstemp", mkstemp)


@needs_compiler
def test_a_read_only_cache_is_read_and_what_is_missing_is_built_elsewhere(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert in_a_new_process() == 42
    refuses_writes(cache, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("it is in the cache"))
        assert in_a_new_process() == 42
    assert compiler.build("other", SOURCE.replace("42", "43")).answer() == 43
    assert len(list((tmp_path / "temporary" / f"halfstep-{os.geteuid()}").glob("other-*.so"))) == 1


@needs_compiler
def test_a_home_is_not_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("HALFSTEP_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    assert in_a_new_process() == 42
    assert len(kept(tmp_path / "temporary" / f"halfstep-{os.geteuid()}")) == 1


@needs_compiler
def test_where_nothing_can_be_executed_it_is_built_elsewhere(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = compiler.ctypes.CDLL

    def cdll(path: str) -> object:
        if Path(path).parent == cache:
            raise OSError("failed to map segment from shared object")
        return load(path)

    monkeypatch.setattr(compiler.ctypes, "CDLL", cdll)
    assert in_a_new_process() == 42
    assert kept(cache) == []
    assert len(kept(tmp_path / "temporary" / f"halfstep-{os.geteuid()}")) == 1


@pytest.mark.exhaustive
@needs_compiler
@pytest.mark.parametrize("masters", [False, True])
def test_a_compiler_that_fails_after_the_first_library_is_told_of_once(
    masters: bool, wrapped: Wrapped, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wrapped('case "$*" in *probe*|*-fsyntax-only*) ;; *) echo killed >&2; exit 4;; esac')

    def train(name: str) -> torch.Tensor:
        torch.manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(5).to(torch.bfloat16 if masters else torch.float32))]
        optimizer = getattr(optimizers, name)(weights, lr=0.1, master_weights="split" if masters else False)
        for _ in range(3):
            weights[0].grad = torch.randn(5).to(weights[0].dtype)
            optimizer.step()
        return weights[0].detach()

    with caplog.at_level(logging.WARNING, logger="halfstep"):
        assert kernels.backend_for("cpu") == "compiled"
        found = [train("FusedAdam"), train("FusedSGD")]
        assert step() == [3.0, 6.0]
    (message,) = caplog.messages
    assert "cannot build a library here (killed)" in message
    monkeypatch.setenv("HALFSTEP_BACKEND", "eager")
    torch.testing.assert_close(found, [train("FusedAdam"), train("FusedSGD")])
