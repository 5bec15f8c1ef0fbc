"""``halfstep.numerics.parity`` on compiled and eager models of ``tests/model_zoo`` in bfloat16, and what it costs.

Each model of the zoo computes its loss under ``torch.autocast``, eagerly and compiled. A difference is explained if
parity gives it a kind other than "kernel", or if the sums of the eager model, computed in float64, move its loss by at
least a quarter of the difference: compiled code adds up in another order, with errors of the same size. ``--injected
10000`` counts what parity finds of the differences of ``tests/parity/injected.py``, with seeds on which its rules were
not written. The cost is the time of ``parity`` for two eager sides, with no difference to look at, in plain passes:
``--cost`` measures it, interleaved, and takes medians.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch._inductor.config
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from halfstep import HalfstepError
from halfstep.numerics import parity

SUMS = ("attention", "logsumexp", "mean", "nll_loss", "norm", "pool", "softmax", "std", "sum", "var")


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

    print("| model | first difference | kind | up to, in ulps | explanation |")
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
    kind, told = first.kind, first.note.removeprefix("told from outputs: ").removesuffix(" of the difference")
    if kind == "kernel":
        at, exact = (_value(side, mode) for mode in (nullcontext(), ExactSums()))  # type: ignore[no-untyped-call]
        share = min(1.0, float((exact - at).abs() / (_value(torch.compile(side), nullcontext()) - at).abs()))
        if share >= 0.25:
            kind, told = "order", f"float64 sums move the eager loss by {share:.0%} of it"
    return [f"`{first.module}`: {first.op}", kind, f"{first.ulps:.3g}", told]


def _value(side: Callable[[], Any], mode: Any) -> torch.Tensor:
    """Return the loss of a side, from the random state that it had."""
    with mode, torch.random.fork_rng():
        return torch.as_tensor(side()).detach().double()


class ExactSums(TorchDispatchMode):
    """Computes ops that add up terms in float64, and rounds their results once. Products stay as they are."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.rpartition(":")[2]
        leaves, tree = tree_flatten((args, kwargs or {}))
        dtypes = [x.dtype for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point()]
        if not dtypes or func.is_view or "backward" in name or not any(part in name for part in SUMS):
            return func(*args, **(kwargs or {}))
        wide = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in leaves]
        args, kwargs = tree_unflatten([torch.float64 if x is torch.float32 else x for x in wide], tree)
        result = func(*args, **kwargs)
        return tree_map_only(torch.Tensor, lambda x: x.to(dtypes[0]) if x.is_floating_point() else x, result)


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
