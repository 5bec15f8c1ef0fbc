"""``halfstep.numerics.parity`` on compiled and eager models of ``tests/model_zoo`` in bfloat16, and what it costs.

Each model of the zoo computes its loss under ``torch.autocast``, eagerly and compiled. A difference is explained if
parity gives it a kind other than "kernel". ``--injected 10000`` counts what parity finds of the differences of
``tests/parity/injected.py``, with seeds on which its rules were not written. The cost is the time of ``parity`` for two
eager sides, with no difference to look at, in plain passes: ``--cost`` measures it, interleaved, and takes medians.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config
from torch import nn

from halfstep import HalfstepError
from halfstep.numerics import parity


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", default="", help="names, or parts of names, between semicolons (default all)")
    parser.add_argument(
        "--injected", type=int, metavar="SEED", help="100 injected differences of seeds from this one on"
    )
    parser.add_argument("--cost", action="store_true", help="measure what parity costs, on MLPs of three widths")


def run(args: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if args.injected is not None:
        return _injected(args.injected)
    return _cost() if args.cost else _zoo(args.models.split(";"))


def _injected(seed: int) -> int:
    from tests.parity.injected import case

    right = 0
    for each in itertools.islice(filter(None, map(case, itertools.count(seed))), 100):
        first = parity(each.plain, each.other, each.inputs).first
        found = first and (first.module, first.kind)
        right += found == (each.place, each.kind)
        if found != (each.place, each.kind):
            print(f"{each.name}: {found}")
    print(f"{right} of 100 modules and kinds are right")
    return 0


def _zoo(parts: list[str]) -> int:
    from tests.model_zoo import test_models  # noqa: F401 - fills KINDS
    from tests.model_zoo.kinds import KINDS

    print("| model | first difference | kind | up to, in ulps | results kept wide explain |")
    print("|---|---|---|---|---|")
    for name, kind in KINDS.items():
        if any(part.strip() in name for part in parts):
            torch.manual_seed(0)
            models, losses = kind.make()
            model, loss = (models, losses) if callable(losses) else (models[0], losses[0])
            print(f"| {' | '.join([name, *_row(model, loss)])} |", flush=True)
    return 0


def _row(model: Any, loss: Callable[[], Any]) -> list[str]:
    def side() -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return (model, loss)[1]()  # a model that a function names is as before after each run

    torch.compiler.reset()
    torch._inductor.config.fallback_random = True  # compiled code draws the random numbers of eager code
    try:
        first = parity(side, torch.compile(side), ()).first
    except (HalfstepError, RuntimeError) as error:
        cause = error.__cause__ or error
        return [f"not compared: {type(cause).__name__}", "", "", ""]
    if first is None:
        return ["none", "", "0", ""]
    share = first.note.partition(" explain ")[2].partition(" ")[0]
    return [f"`{first.module}`: {first.op}", first.kind, f"{first.ulps:.3g}", share]


def _cost() -> int:
    for width in (64, 512, 2048):
        layers = [part for _ in range(4) for part in (nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))]
        model, x = nn.Sequential(*layers).bfloat16(), torch.randn(256, width).bfloat16()
        plain, compared = [], []
        for _ in range(9):
            plain.append(_time(lambda: model(x)))  # noqa: B023 - called here
            compared.append(_time(lambda: parity(model, model, x)))  # noqa: B023
        passes = statistics.median(compared) / statistics.median(plain) / 2
        print(f"width {width}: a plain pass {statistics.median(plain):.1f} ms, parity {passes:.1f} passes a side")
    return 0


def _time(call: Callable[[], Any]) -> float:
    start = time.process_time()  # of one thread: other processes do not count
    call()
    return (time.process_time() - start) * 1e3
