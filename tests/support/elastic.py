"""A job on shards whose ranks are killed: ``python -m tests.support.elastic KILLS SEED DIRECTORY``.

Two ranks train at O2 under FSDP2 in float16 and save after every step. Each time a rank dies, both start anew, as
torchrun would start them, and they go on from the newest whole checkpoint. The job must end with the bits of a job in
which no rank dies.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import set_state_dict
from torch.distributed.fsdp import fully_shard

from halfstep import DynamicLossScale, amp
from tests.support import shards
from tests.support.killed import digest
from tests.support.processes import RankFailed, ranks_of

STEPS = 20


def newest(folder: Path) -> tuple[int, Path] | None:
    """The last step of which there is a whole checkpoint, and where it is. ``.metadata`` is written last."""
    whole = [(int(found.parent.name), found.parent) for found in folder.glob("*/.metadata")]
    return max(whole, default=None)


def train(rank: int, folder: Path, steps: int, dies: tuple[int, int, float] | None = None) -> str:
    """Train from the newest checkpoint on. Returns a hash of every bit at the end.

    Args:
        rank: the rank.
        folder: where the checkpoints are.
        steps: the step to end after.
        dies: the rank to kill, the step in which it dies, and the seconds after the step has begun.
    """
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(8, 15), torch.nn.Tanh(), torch.nn.Linear(15, 4))
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=shards.mesh())
    rule = DynamicLossScale(init_scale=2.0**10, growth_interval=3)
    model, optimizer = amp.initialize(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        opt_level="O2",
        dtype=torch.float16,
        loss_scale=rule,
        verbosity=0,
    )

    def state(**options: Any) -> dict[str, Any]:
        return {**shards.state_dicts(model, optimizer, **options), "amp": amp.state_dict()}

    first, found = 0, newest(folder)
    if found is not None:
        saved = state()
        dcp.load(saved, checkpoint_id=found[1])
        set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
        amp.load_state_dict(saved["amp"])
        first = found[0]
    for step in range(first, steps):
        if dies is not None and dies[:2] == (rank, step):
            threading.Timer(dies[2], os.kill, (os.getpid(), signal.SIGKILL)).start()
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * step + rank))
        loss = model(x).float().square().mean() * (float("inf") if step % 7 == 5 and rank == 1 else 1.0)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.clip_master_grads(1.0)
        optimizer.step()
        optimizer.zero_grad()
        dcp.save(state(), checkpoint_id=folder / str(step + 1))
        if rank == 0 and (folder / str(step - 2)).exists():
            (folder / str(step - 2) / ".metadata").unlink(missing_ok=True)
            shutil.rmtree(folder / str(step - 2), ignore_errors=True)
    end = digest(state(full_state_dict=True))
    amp.deactivate()
    return end


def disturbed(folder: Path, steps: int, kills: int, chance: random.Random) -> tuple[str, list[int]]:
    """Run the job and kill a rank ``kills`` times. Returns the hash, and from where it restarted."""
    resumed: list[int] = []
    for _ in range(kills):
        begun = (newest(folder) or (0,))[0]
        dies = (chance.randrange(2), chance.randrange(begun, begun + STEPS // 2), chance.uniform(0.0, 0.05))
        try:
            ranks_of(2).run(train, folder, steps, dies)
        except RankFailed:
            resumed.append((newest(folder) or (0,))[0])
    return ranks_of(2).run(train, folder, steps)[0], resumed


def compare(kills: int, seed: int, directory: Path) -> list[int]:
    """Compare a job with kills with one without. Returns from which steps the job restarted."""
    for name in ("calm", "killed"):
        (directory / name).mkdir(parents=True)
    steps = STEPS * kills
    expected, _ = ranks_of(2).run(train, directory / "calm", steps)
    found, resumed = disturbed(directory / "killed", steps, kills, random.Random(seed))
    assert found == expected, (found, expected, resumed)
    assert len(resumed) == kills
    return resumed


if __name__ == "__main__":
    resumed = compare(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
    sys.stdout.write(f"killed after checkpoints {resumed}: the same bits\n")
