"""The functions of halfstep that one batch calls, in their order and with their files, for seven usual loops.

Calls, files, returns and the lines of the files are counted. A return is a call in a room (a folder of
``src/halfstep``) that the walk has left before: a reader has to go back there. What differs between machines is asked
for by name: with ``emulate=True`` and ``False`` a walk is the same with 16-bit units and without them. Only the kernels
need a C++ compiler to be so.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import FrameType

import torch
from torch import nn

import halfstep
from halfstep import amp, optimizers, static

SOURCE = f"{Path(halfstep.__file__).parent}/"
BATCH = torch.linspace(0, 1, 32).reshape(4, 8), torch.arange(4) % 3  # whole numbers may be time steps or a mask
LOSS = nn.CrossEntropyLoss()

Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]
Loop = Callable[[Batches], object]


@dataclass(frozen=True)
class Walk:
    """The calls of one batch: the file, below ``src/halfstep``, and the name of each function."""

    calls: list[tuple[str, str]]

    @property
    def files(self) -> int:
        """The number of different files."""
        return len({file for file, _ in self.calls})

    @property
    def returns(self) -> int:
        """How often the walk enters a room that it has left before."""
        stays = [room for room, _ in groupby(file.partition("/")[0] for file, _ in self.calls)]
        return len(stays) - len(set(stays))

    @property
    def lines(self) -> int:
        """The lines of the files that the walk enters: what a reader passes over to follow it."""
        return sum(len(Path(SOURCE, file).read_text().splitlines()) for file in {file for file, _ in self.calls})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--brief", action="store_true", help="print only the numbers of calls, files, returns and lines"
    )


def run(args: argparse.Namespace) -> int:
    for name, prepare in WALKS.items():
        way = walk(prepare())
        print(
            f"{name}: {len(way.calls)} calls in {way.files} files, {way.returns} returns to a room; {way.lines} lines"
        )
        for (file, function), same in groupby([] if args.brief else way.calls):
            count = len(list(same))
            print(f"    {file}:{function}" + (f" x{count}" if count > 1 else ""))
    return 0


def walk(loop: Loop) -> Walk:
    """What a training loop calls for its fifth batch."""
    calls: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        if event == "call" and file.startswith(SOURCE) and not function.startswith("<"):  # no comprehensions
            calls.append((file.removeprefix(SOURCE), function))

    def batches() -> Batches:
        yield from [BATCH] * 4
        gc.collect()
        gc.disable()  # a finalizer of something else must not be counted
        sys.setprofile(note)
        try:
            yield BATCH
        finally:
            sys.setprofile(None)
            gc.enable()

    loop(batches())
    return Walk(calls)


def _model() -> nn.Module:
    torch.manual_seed(0)  # other weights overflow in other batches
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def _scale_loss(kind: type[torch.optim.Optimizer], dtype: str, *, emulate: bool) -> Loop:
    model = _model()
    optimizer = kind(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", dtype=dtype, emulate=emulate, verbosity=0)

    def loop(batches: Batches) -> None:
        for x, y in batches:
            with amp.scale_loss(LOSS(model(x), y), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return loop


def _fused_adam() -> Loop:
    model = _model()
    adam = optimizers.FusedAdam(model.parameters())
    LOSS(model(BATCH[0]), BATCH[1]).backward()

    def loop(batches: Batches) -> None:
        for _ in batches:
            adam.step()

    return loop


def _grad_scaler() -> Loop:
    model, scaler = _model(), amp.GradScaler()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop(batches: Batches) -> None:
        for x, y in batches:
            scaler.scale(LOSS(model(x), y)).backward()
            scaler.step(sgd)
            scaler.update()
            sgd.zero_grad()

    return loop


def _fit() -> Loop:
    network = halfstep.Model(_model())
    sgd = torch.optim.SGD(network.parameters(), lr=0.1)
    network.prepare(sgd, LOSS, amp_configs={"level": "O1", "dtype": "bfloat16", "emulate": True})
    return lambda batches: network.fit(batches, verbose=0)


def _executor() -> Loop:
    model = _model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    program = static.capture(model, LOSS, BATCH)
    static.amp.decorate(sgd, level="O2", dtype="float16", emulate=True).minimize(program.loss)
    executor = static.Executor()

    def loop(batches: Batches) -> None:
        for batch in batches:
            executor.run(program, dict(zip(program.feed_names, batch, strict=True)), [program.loss])

    return loop


WALKS: dict[str, Callable[[], Loop]] = {
    "O2 bfloat16, SGD, scale_loss": lambda: _scale_loss(torch.optim.SGD, "bfloat16", emulate=True),
    "O2 bfloat16, SGD, scale_loss, emulate=False": lambda: _scale_loss(torch.optim.SGD, "bfloat16", emulate=False),
    "O2 float16, torch AdamW, scale_loss": lambda: _scale_loss(torch.optim.AdamW, "float16", emulate=True),
    "GradScaler, SGD": _grad_scaler,
    "FusedAdam.step": _fused_adam,
    "Model.fit at O1": _fit,
    "Executor.run at O2": _executor,
}
"""For each walk what makes its training loop; the model is small, and on the CPU."""
