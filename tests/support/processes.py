"""Real processes for tests: a group of ranks over gloo that runs one function after another, each within a time limit.

Ranks meet at a file, so no port can be taken. When a rank raises, hangs or dies, all of them are killed, the error of
the first one is raised in the test, and the next test gets fresh ones.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from halfstep.amp import PrecisionWarning

__all__ = ["Ranks", "one_rank", "ranks", "ranks_of"]

_LIMIT = 150.0  # a busy machine takes a minute to import torch


_PRELOADED = [
    "pytest",
    "torch._dynamo",  # which the first optimizer imports
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "halfstep.optimizers",
    "tests.support.processes",
]


class RankFailed(AssertionError):
    """What a rank raised, with its traceback."""


def _serve(rank: int, world: int, meeting: str, connection: Connection) -> None:
    gc.freeze()  # a run of the garbage collector looks only at what jobs make
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", PrecisionWarning)
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    dist.init_process_group(
        "gloo", store=dist.FileStore(meeting, world), rank=rank, world_size=world, timeout=timedelta(seconds=_LIMIT)
    )
    while True:
        try:
            job = connection.recv()
        except EOFError:  # the test process is gone
            return
        function, args = job
        torch.manual_seed(0)
        try:
            answer = (True, function(rank, *args))
        except Exception:  # noqa: BLE001 - it is raised again in the test
            answer = (False, traceback.format_exc())
        connection.send_bytes(pickle.dumps(answer))  # by value: torch would share the memory of tensors


class Ranks:
    """``world`` processes that are started when first used."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any, limit: float = _LIMIT) -> list[Any]:
        """``function(rank, *args)`` on every rank; a module-level function of a test file.

        Returns:
            What each rank returned, in order.

        Raises:
            RankFailed: if one raised, died, or took longer than ``limit`` seconds.
        """
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send((function, args))
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + limit
        while len(answers) < self.world:
            waiting = {c: r for r, c in enumerate(self._connections) if r not in answers}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self.kill()
                raise RankFailed(f"ranks {sorted(waiting.values())} took longer than {limit:g} s")
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]
                try:
                    fine, answer = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    fine, answer = False, "it died"
                if not fine:
                    self.kill()
                    raise RankFailed(f"rank {rank}: {answer}")
                answers[rank] = answer
        return [answers[rank] for rank in range(self.world)]

    def _start(self) -> None:
        fork = "forkserver" in multiprocessing.get_all_start_methods()
        context: Any = multiprocessing.get_context("forkserver" if fork else "spawn")
        if fork:  # one process imports what takes seconds, and every rank of the test run is forked from it
            context.set_forkserver_preload(_PRELOADED)
        meeting = str(Path(tempfile.mkdtemp(prefix="halfstep-ranks-")) / "meeting")
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world, meeting, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def close(self) -> None:
        """Let them end by themselves, so that coverage.py writes what it measured in them; kill what stays."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(10)
        self.kill()

    def kill(self) -> None:
        """End them; nothing is left running."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(10)
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.close()
        self._processes, self._connections = [], []


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """A group of which this process is the only rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@functools.cache
def ranks_of(world: int) -> Ranks:
    """The ``world`` processes that all tests of a run share; mark a test that uses them exhaustive."""
    made = Ranks(world)
    atexit.register(made.close)
    return made


@pytest.fixture(scope="session")
def ranks() -> Ranks:
    """Two processes for the whole test run; a test that has them is exhaustive."""
    return ranks_of(2)
