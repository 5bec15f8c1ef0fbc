"""The C++ compiler of the machine: missing, broken, old, slow; and the libraries that are kept of it."""

from __future__ import annotations

import logging
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from halfstep import kernels
from halfstep.kernels.backends import compiler

CACHED = (compiler.available, compiler.build, compiler._compiler, compiler._flags, compiler._processor)
SOURCE = 'extern "C" int answer() { return 42; }'
needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")

Wrapped = Callable[[str], str]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What is known about the compiler is forgotten before and after each test."""
    for function in CACHED:
        function.cache_clear()
    folder = tmp_path / "cache"
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
