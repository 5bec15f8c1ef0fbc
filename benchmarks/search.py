"""Planted faults that ``halfstep.search`` finds: exactly these, or one unit more, and in how many guarded runs.

A CNN, a transformer and an LSTM have 1 to 4 faults each, of six sorts, at places that the seed chooses. They run at
O2 in float16. With ``--rank`` the scores are compared with the truth instead: a transformer of 44 units with one
fault, and the change of the loss with each unit alone in 16 bits. ``--speed`` times a step of that transformer
with the answer of a search. ``--products`` scores the products of a decoder.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import halfstep


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=100, help="models of each kind (default 100)")
    parser.add_argument("--first-seed", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--rank", action="store_true", help="compare the scores with each unit alone in 16 bits")
    parser.add_argument("--width", type=int, default=64, help="of the transformer of --rank and --speed (default 64)")
    parser.add_argument("--speed", action="store_true", help="time a step with the answer and with all in 16 bits")
    parser.add_argument("--products", action="store_true", help="score the products of a decoder in NVFP4")
    parser.add_argument("--json", metavar="FILE", help="also write the figures as JSON")


def run(args: argparse.Namespace) -> int:
    from tests.searching.planted import KINDS, planted, step  # what the tests of the search use

    warnings.simplefilter("ignore")
    if args.rank:
        return rank(args.width)
    if args.speed:
        return speed(args.width)
    if args.products:
        return products()
    figures = {}
    for kind in KINDS:
        exact = more = within = 0
        begin = time.perf_counter()
        for seed in range(args.first_seed, args.first_seed + args.seeds):
            case = planted(kind, seed)
            found = halfstep.search(case.model, step, case.batches, dtype="float16", level="O2", progress=False)
            keep, k = set(found.keep), len(case.faults)
            right = found.status == "found" and case.faults <= keep and len(keep) <= k + 1
            exact += right and keep == case.faults
            more += right and keep != case.faults
            within += len(found.runs) <= 2 * math.log2(k) + k + 2
            if not right:
                print(f"{kind} {seed}: planted {sorted(case.faults)}, found {sorted(keep)}, {found.status}")
        seconds = (time.perf_counter() - begin) / args.seeds
        figures[kind] = {"exact": exact, "one more": more, "runs within the aim": within, "seconds each": seconds}
        print(
            f"{kind}: {exact} exact and {more} with one more, of {args.seeds}; guarded runs within 2 log2(k) + k + 2 "
            f"in {within}; {seconds:.2f} s each",
            flush=True,
        )
    if args.json:
        Path(args.json).write_text(
            json.dumps({"seeds": args.seeds, "first seed": args.first_seed, "kinds": figures}, indent=1)
        )
    return 0


def rank(width: int) -> int:
    """Print the rank correlation of scores and truth, and how often the scores are cheaper, for both dtypes.

    Times are CPU times of one thread, as medians of interleaved runs.
    """
    import torch
    from torch import nn

    from halfstep.core.dtypes import dtype_name
    from halfstep.searching.scores import scores as scores_of
    from halfstep.searching.trials import Setting, copied
    from halfstep.searching.units import watched
    from tests.searching.planted import step

    model, batches = _transformer(width, 8)
    units = watched(model, lambda: step(model, batches[0])).modules(model)
    exact = copied(model).double()
    for dtype in (torch.bfloat16, torch.float16):
        setting = Setting(dtype, "O2", "module")

        def each(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            return nn.functional.cross_entropy(exact(batch[0].double()), batch[1], reduction="none")

        def plain(batches: list[tuple[torch.Tensor, torch.Tensor]] = batches) -> None:
            for batch in batches:
                step(model, batch).backward()
            model.zero_grad()

        times: list[tuple[float, float]] = []
        for _ in range(6):
            begin = time.process_time()
            plain()
            between = time.process_time()
            scores = scores_of(model, units, step, batches, setting)
            times.append((between - begin, time.process_time() - between))
        ratio = statistics.median(scored / plain_seconds for plain_seconds, scored in times[1:])  # the first warms up
        score_seconds = statistics.median(scored for _, scored in times[1:])
        begin = time.process_time()
        with setting.lowered(copied(model)) as low, torch.no_grad():
            reference = torch.cat([each(batch) for batch in batches])
            truth = {}
            for one in units:
                with alone(exact.get_submodule(one), low.get_submodule(one), dtype):
                    losses = torch.cat([each(batch) for batch in batches])
                truth[one] = float((losses - reference).double().square().sum())
        truth_seconds = time.process_time() - begin
        pair = torch.tensor([[scores[one].forward, truth[one]] for one in units], dtype=torch.float64)
        ranks = pair.argsort(0).argsort(0).double()
        correlation = float(torch.corrcoef(ranks.T)[0, 1])
        print(
            f"{dtype_name(dtype)}, {len(units)} units: rank correlation {correlation:.3f}; a scored step takes "
            f"{ratio:.2f} plain steps, all units alone {truth_seconds / score_seconds:.1f} "
            "times as long as the scores",
            flush=True,
        )
    return 0


def speed(width: int) -> int:
    """Print the CPU time of a forward and a backward pass at O2 in float16 with the answer, in fp32 and all in 16 bits.

    Times are CPU times of one thread, as medians of interleaved steps. The optimizer is left out, because with all in
    16 bits the gradients are NaN, and it would skip its steps.
    """
    import copy

    from halfstep import amp
    from tests.searching.planted import step

    model, batches = _transformer(width, 16)
    found = halfstep.search(model, step, batches, dtype="float16", level="O2", progress=False)
    print(found)
    plain = {"opt_level": "O2", "dtype": "float16"}
    options = {"fp32": {"opt_level": "O0"}, "the answer": found.options, "all in 16 bits": plain}
    trained = {}
    for name, given in options.items():
        trained[name] = amp.initialize(copy.deepcopy(model), verbosity=0, **given)
    seconds: dict[str, list[float]] = {name: [] for name in trained}
    for number in range(33):
        for name, one in trained.items():
            begin = time.process_time()
            (128.0 * step(one, batches[number % 16])).backward()
            one.zero_grad()
            seconds[name].append(time.process_time() - begin)
    medians = {name: statistics.median(each[3:]) for name, each in seconds.items()}  # the first warm up
    answer = medians["the answer"]
    print(", ".join(f"{name} {1e3 * each:.1f} ms" for name, each in medians.items()))
    print(
        f"speed of the answer: {medians['all in 16 bits'] / answer:.3f} of all in 16 bits, "
        f"{medians['fp32'] / answer:.2f} times fp32"
    )
    return 0


def products(width: int = 64, tokens: int = 64) -> int:
    """Print which products of a decoder, which has trained for 100 steps, have the highest scores in NVFP4."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in self.qkv(self.norm1(x)).chunk(3, -1))
            mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).flatten(2))
            return x + self.down(functional.gelu(self.up(self.norm2(x))))

    torch.manual_seed(0)
    blocks = {f"block{i}": Block() for i in range(6)}
    parts = {"embed": nn.Embedding(tokens, width), **blocks, "norm": nn.LayerNorm(width)}
    model = nn.Sequential()
    for name, part in {**parts, "head": nn.Linear(width, tokens)}.items():
        model.add_module(name, part)
    chances = (3.0 * torch.randn(tokens, tokens)).softmax(-1)

    def batch() -> torch.Tensor:
        text = torch.randint(tokens, (16, 1))
        for _ in range(32):
            text = torch.cat([text, torch.multinomial(chances[text[:, -1]], 1)], 1)
        return text

    def step(model: nn.Module, text: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(100):
        step(model, batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
    options: dict[str, Any] = {
        "dtype": "bfloat16",
        "products": "nvfp4",
        "passes": True,
        "progress": False,
        "budget": 12,
    }
    found = halfstep.search(model, step, [batch() for _ in range(16)], **options, guard=halfstep.Guard(tolerance=0.01))
    print(found)
    sums: dict[str, dict[str, float]] = {}
    for unit, score in found.scores.items():
        layer, _, which = unit.rpartition(".")
        sums.setdefault(layer, {})[which] = score.total
    total = sum(sum(each.values()) for each in sums.values())
    first = sum(max(each, key=each.__getitem__) == "forward" for each in sums.values())
    print(f"head.forward: {sums['head']['forward'] / total:.1%} of all scores; forward first in {first} of {len(sums)}")
    for name in blocks:
        print(name, f"{sum(sum(each.values()) for layer, each in sums.items() if layer.startswith(name)) / total:.2%}")
    return 0


@contextmanager
def alone(unit: Any, low: Any, dtype: Any) -> Iterator[None]:
    """Let a module of an fp32 model read, compute and return 16 bits, as ``low`` does."""
    unit.forward = lambda x: low(x.to(dtype)).to(dtype).double()
    yield
    del unit.forward


def _transformer(width: int, count: int) -> tuple[Any, list[Any]]:
    """A transformer of 44 units with one fault and some batches, for runs in one thread."""
    import torch
    from torch import nn

    from tests.searching.planted import Attention, Fault, Head

    torch.manual_seed(0)
    torch.set_num_threads(1)
    parts = [(nn.LayerNorm(width), Attention(width), nn.LayerNorm(width), *_mlp(width)) for _ in range(6)]
    model = nn.Sequential(nn.Linear(width, width), *(each for part in parts for each in part), Head(width))
    model.insert(20, Fault("variance"))
    return model, [(torch.randn(16, 32, width), torch.randint(5, (16,))) for _ in range(count)]


def _mlp(width: int) -> Sequence[Any]:
    from torch import nn

    return nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.0)
