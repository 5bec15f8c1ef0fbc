"""An accumulation window on two processes over gloo: torch's DistributedDataParallel with no_sync and autocast, against
halfstep at O1 and O2. A window is several backward passes and a step of AdamW. Only the last pass is synced.

With --sharded: torch's FSDP2, which casts fp32 shards by its MixedPrecisionPolicy, against 16-bit shards at O2. Both
send the same bytes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from halfstep import amp, optimizers

from .harness import Contender, Timing, interleave, table, write_json

BASELINE = "torch"
RANKS = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=20, help="windows to time (default 20)")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64, help="of each process and pass")
    parser.add_argument("--window", type=int, default=4, help="backward passes to a step (default 4)")
    parser.add_argument("--sharded", action="store_true", help="FSDP2 instead of DistributedDataParallel")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to a file")


def run(args: argparse.Namespace) -> int:
    settings = {name: getattr(args, name) for name in ("steps", "width", "layers", "batch", "window", "sharded")}
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "meeting")
        ranks = [context.Process(target=_rank, args=(i, meeting, settings, theirs)) for i in range(RANKS)]
        for process in ranks:
            process.start()
        theirs.close()
        try:
            timings = [Timing(**found) for found in ours.recv()]
        except EOFError:
            print("accumulation: a process failed; see above")
            return 1
        finally:
            for process in ranks:
                process.join(60)
                process.kill()
    print(f"cpu, {RANKS} processes of 1 thread, {settings}\n{table(timings, BASELINE)}")
    if args.json:
        write_json(args.json, "accumulation", torch.device("cpu"), {"ranks": RANKS, **settings}, BASELINE, timings)
    return 0


def _rank(rank: int, meeting: str, settings: dict[str, int], results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(meeting, RANKS), rank=rank, world_size=RANKS)
    contenders = [Contender(BASELINE, _torchs(settings))]
    if not settings["sharded"]:
        contenders.append(Contender("O1", _ours(settings, "O1", torch.optim.AdamW, fused=True)))
    contenders += [
        Contender("O2", _ours(settings, "O2", torch.optim.AdamW, fused=True)),
        Contender("O2, FusedAdam", _ours(settings, "O2", optimizers.FusedAdam)),
    ]
    # Every rank needs the same number of rounds. With a time limit, one rank would stop before the other.
    timings = interleave(
        contenders, device=torch.device("cpu"), baseline=BASELINE, rounds=settings["steps"], max_seconds=1e9
    )
    if rank == 0:
        results.send([asdict(timing) for timing in timings])
    results.close()
    dist.barrier()


def _net(settings: dict[str, int]) -> nn.Module:
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Linear(settings["width"], settings["width"]), nn.GELU()) for _ in range(settings["layers"])
    ]
    return nn.Sequential(*layers)


def _sharded(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """``dtype``: what FSDP2 casts gathered weights to."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (RANKS,))
    for module in (*model.children(), model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return model


def _window(
    settings: dict[str, int],
    model: Any,
    optimizer: torch.optim.Optimizer,
    one_pass: Callable[[torch.Tensor], None],
) -> Callable[[], None]:
    x = torch.randn(settings["batch"], settings["width"])

    def step() -> None:
        for i in range(settings["window"]):
            last = i == settings["window"] - 1
            if settings["sharded"]:
                model.set_requires_gradient_sync(last)
            with nullcontext() if last or settings["sharded"] else model.no_sync():
                one_pass(x)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _torchs(settings: dict[str, int]) -> Callable[[], None]:
    sharded = settings["sharded"]
    model = _sharded(_net(settings), torch.bfloat16) if sharded else DistributedDataParallel(_net(settings))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def one_pass(x: torch.Tensor) -> None:
        with nullcontext() if sharded else torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().mean() / settings["window"]
        loss.backward()

    return _window(settings, model, optimizer, one_pass)


def _ours(settings: dict[str, int], level: str, make: Any, **options: Any) -> Callable[[], None]:
    model: Any = _sharded(_net(settings)) if settings["sharded"] else _net(settings)
    optimizer = make(model.parameters(), lr=1e-4, **options)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, dtype=torch.bfloat16, verbosity=0)
    amp.deactivate()  # the casts of O1 are for the whole process, but each contender opens its own
    model = model if settings["sharded"] else DistributedDataParallel(model)

    def one_pass(x: torch.Tensor) -> None:
        with amp.auto_cast(dtype="bfloat16") if level == "O1" else nullcontext():
            loss = model(x).float().square().mean() / settings["window"]
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()

    return _window(settings, model, optimizer, one_pass)
