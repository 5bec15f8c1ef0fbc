"""The functions of halfstep that one batch calls, in their order and with their files, for five usual loops."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import halfstep
from halfstep import amp, optimizers, static

SOURCE = f"{Path(halfstep.__file__).parent}/"
BATCH = torch.ones(4, 8), torch.arange(4) % 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    halves = ["float16", "bfloat16"]
    parser.add_argument("--dtype", choices=halves, default="bfloat16", help="of amp.initialize and Model.fit")
    parser.add_argument("--brief", action="store_true", help="print only the numbers of calls and files")


def run(args: argparse.Namespace) -> int:
    for name, loop in loops(args.dtype).items():
        calls = walk(loop)
        print(f"{name}: {len(calls)} calls in {len({file for file, _ in calls})} files")
        for (file, function), same in groupby([] if args.brief else calls):
            count = len(list(same))
            print(f"    {file}:{function}" + (f" x{count}" if count > 1 else ""))
    return 0


def walk(loop: Callable[[Iterator[Any]], object]) -> list[tuple[str, str]]:
    """The file and the name of each function of halfstep that a training loop calls for its fifth batch."""
    calls: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        if event == "call" and file.startswith(SOURCE) and not function.startswith("<"):  # no comprehensions
            calls.append((file.removeprefix(SOURCE), function))

    def batches() -> Iterator[Any]:
        yield from [BATCH] * 4
        sys.setprofile(note)
        yield BATCH
        sys.setprofile(None)

    loop(batches())
    return calls


def loops(dtype: str) -> dict[str, Callable[[Iterator[Any]], object]]:
    """A training loop over batches for each walk; the model is small, and on the CPU."""
    models = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)) for _ in range(5)]
    sgds = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    loss_fn, scaler, network = nn.CrossEntropyLoss(), amp.GradScaler(), halfstep.Model(models[3])
    amp.initialize(models[0], sgds[0], opt_level="O2", dtype=dtype, verbosity=0)
    adam = optimizers.FusedAdam(models[1].parameters())
    network.prepare(sgds[3], loss_fn, amp_configs={"level": "O1", "dtype": dtype})
    program = static.capture(models[4], loss_fn, BATCH)
    static.amp.decorate(sgds[4], level="O2", dtype="float16").minimize(program.loss)

    def scale_loss(batches: Iterator[Any]) -> None:
        for x, y in batches:
            with amp.scale_loss(loss_fn(models[0](x), y), sgds[0]) as scaled_loss:
                scaled_loss.backward()
            sgds[0].step()
            sgds[0].zero_grad()

    def fused_adam(batches: Iterator[Any]) -> None:
        loss_fn(models[1](BATCH[0]), BATCH[1]).backward()
        for _ in batches:
            adam.step()

    def grad_scaler(batches: Iterator[Any]) -> None:
        for x, y in batches:
            scaler.scale(loss_fn(models[2](x), y)).backward()
            scaler.step(sgds[2])
            scaler.update()
            sgds[2].zero_grad()

    def executor(batches: Iterator[Any]) -> None:
        for batch in batches:
            static.Executor().run(program, dict(zip(program.feed_names, batch, strict=True)), [program.loss])

    return {
        f"amp.initialize at O2 with SGD in {dtype}": scale_loss,
        "FusedAdam.step": fused_adam,
        "amp.GradScaler with SGD": grad_scaler,
        f"Model.fit at O1 in {dtype}": lambda batches: network.fit(batches, verbose=0),
        "Executor.run at O2 in float16": executor,
    }
