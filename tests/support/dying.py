"""Runs windows on ranks of which one dies: ``python -m tests.support.dying CASES SEED DIRECTORY``.

The others must end with an error before ``LIMIT`` seconds are over. One process imports torch and forks the ranks.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.fuzz.windows import Micro, Plan, train

LIMIT = 30.0


def plan_of(chance: random.Random) -> Plan:
    """A plan of three windows, each of which ends with what all ranks take part in."""

    def flags(world: int) -> tuple[bool, ...]:
        return tuple(chance.random() < 0.7 for _ in range(world))

    world = chance.choice([2, 3])
    windows = tuple(
        tuple(
            Micro(chance.random() < 0.5, (2,) * world, flags(world), (False,) * world)
            for _ in range(chance.randint(1, 3))
        )
        for _ in range(3)
    )
    return Plan(world, chance.choice(["O0", "O2"]), torch.bfloat16, "AdamW", windows, None)


def run(rank: int, plan: Plan, dies: tuple[int, int, int], meeting: str) -> None:
    """One rank."""
    store = dist.FileStore(meeting, plan.world)
    limit = timedelta(seconds=LIMIT / 4)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=plan.world, timeout=limit)
    train(rank, plan, dies)


def begin(plan: Plan, dies: tuple[int, int, int], meeting: str) -> list[int]:
    """Start the ranks of a plan, and return their ids."""
    started = []
    for rank in range(plan.world):
        child = os.fork()
        if not child:
            code = 0
            try:
                run(rank, plan, dies, meeting)
            except Exception:  # noqa: BLE001 - which one is torch's business
                code = 3
            finally:
                os._exit(code)
        started.append(child)
    return started


def endings(children: Sequence[int]) -> list[int]:
    """How each rank ended: 9 where it died, 3 after an error, 0 at its end; -1 where it had to be killed."""
    end, codes = time.monotonic() + LIMIT, dict.fromkeys(children, -1)
    while -1 in codes.values() and time.monotonic() < end:
        for child in [child for child, code in codes.items() if code == -1]:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                codes[child] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    for child in [child for child, code in codes.items() if code == -1]:
        os.kill(child, 9)
        os.waitpid(child, 0)
    return [codes[child] for child in children]


def main(cases: int, seed: int, directory: Path) -> None:
    """Try so many plans at once: what survives a death only waits."""
    torch.set_num_threads(1)
    chance, cases_begun = random.Random(seed), []
    for case in range(cases):
        plan = plan_of(chance)
        window = chance.randrange(2)  # there is a window after it, so that nobody can miss it
        dies = (window, chance.randrange(len(plan.windows[window])), chance.randrange(plan.world))
        cases_begun.append((plan, dies, begin(plan, dies, str(directory / f"meeting{case}"))))
    for plan, dies, started in cases_begun:
        found = endings(started)
        expected = [9 if rank == dies[2] else 3 for rank in range(plan.world)]
        assert found == expected, (found, plan, dies)
    sys.stdout.write(f"{cases} deaths, an error on every other rank\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
