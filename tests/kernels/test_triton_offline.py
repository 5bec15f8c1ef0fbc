"""The assembly of the Triton kernels: vector accesses, no wasted bytes, spills, fp64 or approximations, on any machine.

What is asked of a kernel is ``Facts.faults`` in ``benchmarks/triton_offline.py``. Triton compiles in other processes,
because this one has its interpreter.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import triton_offline
from benchmarks.triton_offline import KERNELS, KNOWN, STORAGES, TARGETS, combinations
from tests.support.backends import needs_triton

pytestmark = needs_triton

HOME = Path(__file__).parents[2]


SERVER = """if True:
    import contextlib, io, json, os, sys, traceback
    from benchmarks.__main__ import main
    with contextlib.suppress(Exception), contextlib.redirect_stdout(io.StringIO()):
        main("triton_offline --kernels scale_kernel --storages fp32 --targets sm_80".split())
    for mutate, arguments, output in map(json.loads, sys.stdin):
        if not (child := os.fork()):
            status = 2
            try:
                for stream in (1, 2):
                    os.dup2(os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND), stream)
                exec(mutate, {})
                status = main(arguments)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Runs commands in forks of one process, in which Triton without its interpreter has compiled something."""

Offline = Callable[..., tuple[int, list[dict[str, Any]], str]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    folder = tmp_path_factory.mktemp("triton")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"HALFSTEP_CACHE_DIR": str(folder / "sources"), "TRITON_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, "-c", SERVER]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    with subprocess.Popen(command, cwd=HOME, env=env, start_new_session=True, **pipes) as process:
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # with the child of a compilation that hangs


@pytest.fixture
def offline(tmp_path: Path, server: Any) -> Offline:
    """Run the benchmark: its status, its records and what it printed. ``mutate`` is Python that runs before it."""

    def run(*arguments: str, mutate: str = "") -> tuple[int, list[dict[str, Any]], str]:
        file, output = tmp_path / "facts.json", tmp_path / "printed"
        server.stdin.write(
            json.dumps([mutate, ["triton_offline", *arguments, "--json", str(file)], str(output)]) + "\n"
        )
        status, printed = int(server.stdout.readline()), output.read_text()
        lacking = re.search(r"Cannot find (ptxas|cuobjdump)\S*|ROCm linker \S+ not found", printed)
        if lacking:  # before Triton 3.6 the wheel had no linker for AMD
            pytest.skip(f"the triton package here cannot compile for this target: {lacking[0]}")
        assert status in (0, 1), printed
        assert "Warning" not in printed
        return status, json.loads(file.read_text())["kernels"], printed

    return run


def assert_sound(result: tuple[int, list[dict[str, Any]], str]) -> list[dict[str, Any]]:
    status, records, printed = result
    assert status == 0, printed
    for facts in records:
        assert facts["moved"] <= (1.06 if facts["codes"] else 1.05) * facts["needed"]
        widths = {column: width * (2 if column in facts["codes"] else 1) for column, width in facts["widths"].items()}
        assert all(width >= 8 for width in widths.values()), facts
        assert (facts["fp64"], facts["approximate"], facts["fused"]) == (0, 0, 0)
        spills = f"{facts['kernel']}, {facts['storage']}, {facts['target']}: spills: {facts['spills']}"
        assert not facts["spills"] or spills in KNOWN
    return records


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_the_split_adam_step_with_clipping_moves_28_bytes_in_vectors(offline: Offline, target: str) -> None:
    arguments = ["--kernels", "adam", "read_gradients", "--storages", "bf16 split", "--targets", target]
    reading, update = assert_sound(offline(*arguments))
    assert (reading["needed"], update["needed"]) == (2, 26)
    assert reading["moved"] + update["moved"] <= 1.01 * 28
    assert reading["widths"] == {"grad0": 16}
    assert update["widths"]["exp_avg0"] == update["widths"]["exp_avg_sq0"] == 16
    assert update["widths"]["grad0"] == update["widths"]["param0"] == update["widths"]["param1"] == 8
    assert update["in_flight"] >= 48 << 10


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_the_split_adam_step_with_8_bit_moments_moves_14_bytes(offline: Offline, target: str) -> None:
    """12 bytes less than with fp32 moments, which have 26."""
    arguments = ["--kernels", "adam", "--storages", "8-bit moments", "--targets", target]
    (update,) = assert_sound(offline(*arguments))
    assert update["needed"] == 14 + 16 / 256
    assert update["moved"] <= 14.5
    assert update["in_flight"] >= 40 << 10


ONE_STORAGE = """
from itertools import groupby
from benchmarks import triton_offline as t
programs = [list(each) for _, each in groupby(t.combinations(), key=lambda program: program[0].name)]
t.combinations = lambda: [each[(place + {}) % len(each)] for place, each in enumerate(programs)]
"""
"""Of each kernel one program; with as many numbers as it has storages, it has all of them."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_on_every_target(offline: Offline, target: str, request: pytest.FixtureRequest) -> None:
    """With one storage each, for compiling takes minutes; there are as many targets as storages."""
    everything = request.config.getoption("combinations") == "all"
    mutate = "" if everything else ONE_STORAGE.format(list(TARGETS).index(target))
    records = assert_sound(offline("--targets", target, mutate=mutate))
    assert {facts["kernel"] for facts in records} == set(KERNELS)
    assert len(records) == (len(list(combinations())) if everything else len(KERNELS))


def test_every_program_is_compiled_for_one_of_the_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    every, found = set(combinations()), set()
    for place in range(len(TARGETS)):
        monkeypatch.setattr(triton_offline, "combinations", combinations)
        exec(ONE_STORAGE.format(place), {})
        found |= set(triton_offline.combinations())
    assert found == every
    assert {storage for _, storage in every} == set(STORAGES)


REPLACE = """
from halfstep.kernels.backends import triton_source as t
t.{0} = t.{0}.replace({1!r}, {2!r})
assert {2!r} in t.{0}
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mutate", "fault"),
    [
        (
            REPLACE.format("_ENTRY", "count = tl.multiple_of(count, %(vector)d)", "pass"),
            "accesses of less than 8 bytes",
        ),
        (REPLACE.format("_PRELUDE", "total = tl.sum(x * x)", "total = tl.sum(x.to(tl.float64) * x)"), "fp64: "),
        (
            "from halfstep.kernels.backends import triton_source as t\nlines = t._lines\n"
            "t._lines = lambda *a: [s.replace('tl.sqrt_rn', 'tl.sqrt').replace('div_rn', 'fdiv') for s in lines(*a)]",
            "approximate: ",
        ),
        ("from halfstep.kernels.backends import triton as t\nt.OPTIONS.clear()", "fused: "),
        ("from halfstep.kernels.backends import launch_config as a\na.DEFAULT = a.LaunchConfig(8192, 4)", "spills: "),
        (
            "from halfstep.kernels.backends import triton_source as t\nloads = t._loads\n"
            "again = ['again = tl.load(exp_avg0 + i, mask=alive, other=0, volatile=True)']\n"
            "t._loads = lambda i, name, *a: loads(i, name, *a) + again * (name == 'exp_avg')",
            "bytes an element are moved where 22.0 are needed",
        ),
    ],
    ids=["no hint", "fp64 sums", "approximate operations", "fused operations", "spills", "a column read twice"],
)
def test_a_kernel_that_gets_worse_is_noticed(offline: Offline, mutate: str, fault: str) -> None:
    arguments = ["--kernels", "lamb_moments", "--storages", "bf16 split", "--targets", "sm_90"]
    status, _, printed = offline(*arguments, mutate=mutate)
    assert status == 1
    assert fault in printed
