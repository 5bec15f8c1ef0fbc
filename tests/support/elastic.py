"""A job of torchrun on shards whose ranks are killed: ``python -m tests.support.elastic KILLS SEED DIRECTORY``.

Two ranks train at O2 under FSDP2 in float16 and save after every step. Each time a rank dies, torchrun starts both
anew, and they go on from the newest whole checkpoint. The job must end with the bits of one that nobody disturbed.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import set_state_dict
from torch.distributed.fsdp import fully_shard

from halfstep import DynamicLossScale, amp
from tests.support import shards
from tests.support.killed import digest
from tests.support.processes import Ranks

LIMIT = 1500.0


def newest(folder: Path) -> tuple[int, Path] | None:
    """The last step of which there is a whole checkpoint, and where it is. ``.metadata`` is written last."""
    whole = [(int(found.parent.name), found.parent) for found in folder.glob("*/.metadata")]
    return max(whole, default=None)


def train(rank: int, folder: Path, steps: int) -> str:
    """Train from the newest checkpoint on. Returns a hash of every bit at the end."""
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
    (folder / f"begun{rank}.{os.getpid()}").touch()
    for step in range(first, steps):
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
    """Run the job under torchrun and kill a rank ``kills`` times. Returns the hash, and from where it restarted."""
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", str(5 * kills + 10), "-m", "tests.support.elastic", "worker", str(folder), str(steps)]
    with (folder / "log").open("w") as log:
        job = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    resumed: list[int] = []
    deadline = time.monotonic() + LIMIT
    try:
        for _ in range(kills):
            alive: list[Path] = []
            while len(alive) < 2 and job.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
                alive = [found for found in folder.glob("begun*") if _runs(int(found.suffix[1:]))]
            goal = (newest(folder) or (0,))[0] + chance.randrange(40)
            while (newest(folder) or (0,))[0] < goal and all(_runs(int(found.suffix[1:])) for found in alive):
                time.sleep(0.001)
            time.sleep(chance.uniform(0.0, 0.05))
            victim = int(chance.choice(alive).suffix[1:])
            with contextlib.suppress(ProcessLookupError):  # it has failed to meet the other one
                os.kill(victim, signal.SIGKILL)
            resumed.append((newest(folder) or (0,))[0])
            for path in alive:
                path.unlink()
        code = job.wait(max(1.0, deadline - time.monotonic()))
        if code:
            raise AssertionError(f"torchrun ended with {code}: {(folder / 'log').read_text()}")
        return (folder / "end").read_text(), resumed
    finally:
        if job.poll() is None:
            job.terminate()  # which ends the ranks too
            job.wait()


def _runs(process: int) -> bool:
    """Whether it is there and no zombie."""
    try:
        return ") Z" not in Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False


def main(kills: int, seed: int, directory: Path) -> None:
    """Compare a job with kills with one without."""
    steps = 40 * kills
    ranks = Ranks(2)
    (directory / "calm").mkdir(parents=True)
    expected, _ = ranks.run(train, directory / "calm", steps)
    ranks.close()
    found, resumed = disturbed(directory / "killed", steps, kills, random.Random(seed))
    assert found == expected, (found, expected, resumed)
    sys.stdout.write(f"{kills} kills of {steps} steps, after checkpoints {resumed}: the same bits\n")


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        meeting = Path(sys.argv[2]) / f"meeting{os.environ['TORCHELASTIC_RESTART_COUNT']}"
        place = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
        dist.init_process_group(
            "gloo", store=dist.FileStore(str(meeting), place["world_size"]), timeout=timedelta(seconds=30), **place
        )
        end = train(dist.get_rank(), Path(sys.argv[2]), int(sys.argv[3]))
        if dist.get_rank() == 0:
            (Path(sys.argv[2]) / "end").write_text(end)
        dist.destroy_process_group()
    else:
        main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
