"""Trains, saves after every step, and is killed with SIGKILL at random moments: ``python -m tests.support.killed``.

One process imports torch and forks the ones that are killed, which takes milliseconds. A run without kills comes first;
it says what the state after each step is. A killed run must go on from its checkpoint with these very states.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from halfstep import DynamicLossScale, amp
from halfstep.parallel import save_checkpoint

STEPS = 120


def training(ranks: int, checkpoint: Path | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Train from the checkpoint on; yields each step and the state after it."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))
    optimizer: Any = torch.optim.Adam(net.parameters(), lr=1e-2)
    rule = DynamicLossScale(init_scale=2.0**10, growth_interval=3)
    net, optimizer = amp.initialize(
        net, optimizer, opt_level="O2", dtype=torch.float16, loss_scale=rule, verbosity=0, emulate="auto"
    )
    first = 0
    if checkpoint is not None and checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        amp.load_state_dict(saved["amp"])
        first = saved["step"] + 1
    wrapped = nn.parallel.DistributedDataParallel(net) if ranks > 1 else net
    rank = dist.get_rank() if ranks > 1 else 0
    for step in range(first, STEPS):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        x, y = torch.randn(16, 8, generator=generator), torch.randint(0, 4, (16,), generator=generator)
        loss = F.cross_entropy(wrapped(x), y) * (float("inf") if step % 7 == 5 else 1.0)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield (
            step,
            {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict(), "step": step},
        )


def digest(state: Any) -> str:
    """A hash of every bit of a state."""
    made = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            made.update(str(value.dtype).encode() + value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key, item in value.items():
                made.update(str(key).encode())
                add(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                add(item)
        else:
            made.update(repr(value).encode())

    add(state)
    return made.hexdigest()


def run(rank: int, ranks: int, directory: Path, expected: list[str] | None) -> None:
    """One process of a run: the first writes every digest, a later one saves and compares."""
    if ranks > 1:
        meeting = str(directory / "meeting")
        store = dist.FileStore(meeting, ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=30))
    checkpoint = None if expected is None else directory / "checkpoint.pt"
    found = []
    for step, state in training(ranks, checkpoint):
        (directory / "begun").touch()
        found.append(digest(state))
        if expected is not None:
            if rank == 0 and found[-1] != expected[step]:
                raise AssertionError(f"step {step} of a resumed run is not that of a run without kills")
            save_checkpoint(state, directory / "checkpoint.pt")
    if expected is None and rank == 0:
        (directory / "digests").write_text("\n".join(found))
    if ranks > 1:
        dist.destroy_process_group()


def forked(ranks: int, directory: Path, expected: list[str] | None) -> list[int]:
    """Start the processes of a run, and return their ids."""
    for name in ("meeting", "begun"):
        (directory / name).unlink(missing_ok=True)
    started = []
    for rank in range(ranks):
        child = os.fork()
        if not child:
            code = 1
            try:
                run(rank, ranks, directory, expected)
                code = 0
            except BaseException as error:  # noqa: BLE001 - a fork must not go on as its parent
                (directory / f"error{rank}").write_text(repr(error))
            finally:
                os._exit(code)
        started.append(child)
    return started


def main(ranks: int, kills: int, seed: int, directory: Path) -> None:
    """Kill ``kills`` runs and look at the checkpoint after each."""
    torch.set_num_threads(1)
    chance = random.Random(seed)
    next(training(1, None))  # what is imported and compiled once is there before the first fork
    assert [os.waitpid(child, 0)[1] for child in forked(ranks, directory, None)] == [0] * ranks
    expected = (directory / "digests").read_text().split("\n")
    checkpoint = directory / "checkpoint.pt"
    loaded = began = 0
    for _ in range(kills):
        started = forked(ranks, directory, expected)
        patience = 20.0 if chance.random() < 0.9 else 0.0  # some die before their first step
        begun = time.monotonic()
        while time.monotonic() - begun < patience and not (directory / "begun").exists():
            time.sleep(0.002)
        time.sleep(chance.uniform(0.0, 0.05))
        victim = chance.choice(started)
        os.kill(victim, signal.SIGKILL)
        if ranks > 1:
            time.sleep(chance.uniform(0.0, 0.05))  # the others notice, or have not noticed yet
        codes = []
        for child in started:
            if child != victim:
                os.kill(child, signal.SIGKILL)
            codes.append(os.waitpid(child, 0)[1])
        for error in directory.glob("error*"):
            if "not that of" in error.read_text():
                raise AssertionError(error.read_text())
            error.unlink()  # a rank that has lost the other one
        if checkpoint.exists():
            saved = torch.load(checkpoint, weights_only=True)
            assert digest(saved) == expected[saved["step"]], "a checkpoint is not the state that was saved"
            loaded += 1
            if saved["step"] == STEPS - 1:
                checkpoint.unlink()
                began += 1
    assert [os.waitpid(child, 0)[1] for child in forked(ranks, directory, expected)] == [0] * ranks
    sys.stdout.write(f"{kills} kills, {loaded} checkpoints loaded, {began + 1} runs\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
