"""The share of a step that ``halfstep.profile`` predicts for a fix, against what the fix brings, on slow scripts.

The scripts are those of ``tests/profiling/slow_scripts.py`` whose fix is a change of their text. Each is profiled, and
then a step of it and of its fixed text run in turns; the gain is the difference of their medians. Both are shares of
the step of their own measurement. ``--cost`` measures instead what profiled steps take in steps under torch.profiler
with shapes, on one MLP. ``--ceiling`` compares the ceiling of fp32 steps of ``tests/model_zoo`` with the faster of
their steps at O1 and at O2 in bfloat16, in CPU time of one thread.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

import halfstep
from halfstep import amp

from .harness import Contender, interleave

FIXES: dict[str, tuple[tuple[str, str], ...]] = {
    "a loop over rows": (("sum(model(row).square().mean() for row in x)", "model(x).square().mean()"),),
    "bfloat16 products of odd width": (("1021", "1024"),),
    "an output of 4,099 words": (("4099", "4104"),),
    "layouts back and forth": (
        ("x = part(x.contiguous(memory_format=torch.channels_last))", "x = part(x)"),
        ("            x = x.contiguous(memory_format=torch.contiguous_format)\n", ""),
        ("            x = x.contiguous(memory_format=torch.channels_last).contiguous()\n", ""),
    ),
    "an fp32 island: softmax": ((".float()\n        h =", "\n        h ="),),
    "an fp32 island: gelu by hand": (("h = x.float()", "h = x"),),
    "an fp32 product in a bfloat16 model": (("self.body(x).float()", "self.body(x)"), ("4096)", "4096).bfloat16()")),
    "autocast off around the wide layers": (("enabled=False", "dtype=torch.bfloat16"),),
    "casts there and back": (("range(8)", "range(0)"),),
    "a metric read sample by sample": (
        ("sum(best[i].item() == y[i].item() for i in range(2000))", "(best == y).sum().item()"),
    ),
    "Adam in a Python loop": (("foreach=False, fused=False", "fused=True"),),
    "AdamW of many weights": (("AdamW(model.parameters())", "AdamW(model.parameters(), fused=True)"),),
    "gradients zeroed and kept": (("p.grad.zero_()", "p.grad = None"),),
    "zero_grad(set_to_none=False)": (("set_to_none=False", "set_to_none=True"),),
    "a data set that sleeps": (("time.sleep(0.002); ", ""),),
    "an average that is denormal": (("fill_(1e-40)", "fill_(1e-3)"),),
}
"""By script: the parts of its text that the fix replaces."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scripts", default="", help="names, or parts of names, between semicolons (default all)")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each text (default 15)")
    parser.add_argument("--ceiling", action="store_true", help="compare the ceiling with what 16 bits bring, by model")
    parser.add_argument("--cost", action="store_true", help="measure what profiled steps take, against torch.profiler")


def run(args: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if args.ceiling:
        return _ceilings(args.scripts.split(";"), args.rounds)
    return _cost(args.rounds) if args.cost else _gains(args.scripts.split(";"), args.rounds)


def _gains(parts: list[str], rounds: int) -> int:
    from tests.profiling.slow_scripts import SCRIPTS

    print("| script | cause | a step, ms | predicted gain | measured gain | predicted / measured |")
    print("|---|---|---|---|---|---|")
    near = count = 0
    for script in SCRIPTS:
        if script.name in FIXES and any(part.strip() in script.name for part in parts):
            text = script.text
            for old, new in FIXES[script.name]:
                assert old in text, old
                text = text.replace(old, new)
            slow: Any = script.run()
            fixed: Any = script._replace(text=text).run()
            found = halfstep.profile(slow["step"], model=slow["model"], optimizer=slow["optimizer"])
            predicted = sum(each.evidence["share"] for each in found.findings if each.code == script.cause)
            contenders = [Contender("slow", slow["step"]), Contender("fixed", fixed["step"])]
            timings = interleave(contenders, device=torch.device("cpu"), baseline="slow", rounds=rounds)
            before, after = (1e3 * each.median for each in timings)
            gain = (before - after) / before
            ratio = predicted / gain
            near, count = near + (abs(ratio - 1) <= 0.3), count + 1
            row = f"{before:.3g} | {predicted:.0%} | {gain:.0%} | {ratio:.2f}"
            print(f"| {script.name} | {script.cause} | {row} |", flush=True)
    print(f"{near} of {count} within 30 %")
    return 0


def _ceilings(parts: list[str], rounds: int) -> int:
    from tests.model_zoo import test_models  # noqa: F401 - fills KINDS
    from tests.model_zoo.kinds import KINDS

    print("| model | ceiling | reached |")
    print("|---|---|---|")
    below = count = 0
    for name, kind in KINDS.items():
        if not any(part.strip() in name for part in parts):
            continue
        steps = {level: _step(kind, level) for level in ("O0", "O1", "O2")}
        ceiling = halfstep.profile(steps["O0"], warmup=1, steps=3).ceiling
        times: dict[str, list[float]] = {}
        for level, step in steps.items():
            with suppress(RuntimeError):  # such as an op that has no 16-bit dtype
                step()
                step()
                times[level] = []
        for _ in range(rounds):
            for level, each in times.items():
                began = time.process_time()
                steps[level]()
                each.append(time.process_time() - began)
        taken = {level: statistics.median(each) for level, each in times.items()}
        reached = taken.pop("O0") / min(taken.values(), default=torch.inf)
        below, count = below + (ceiling < reached), count + 1
        print(f"| {name} | {ceiling:.2f} | {reached:.2f} |", flush=True)
    print(f"the ceiling is below what is reached for {below} of {count} models")
    return 0


def _step(kind: Any, level: str) -> Callable[[], None]:
    torch.manual_seed(0)
    models, losses = kind.make()
    model, loss = (models, losses) if callable(losses) else (models[0], losses[0])
    optimizer = kind.optimizer(model.parameters(), lr=kind.lr)
    if level == "O2":
        amp.initialize(model, optimizer, opt_level="O2", dtype="bfloat16", verbosity=0, **kind.at_o2)

    def step() -> None:
        with amp.auto_cast(level == "O1", level="O1", dtype="bfloat16"):
            found = loss()
        found.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _cost(rounds: int) -> int:
    from halfstep.profiling.run import OpRecorder

    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(20)))
    x = torch.randn(64, 256)

    def step() -> None:
        model(x).sum().backward()

    def plain() -> float:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True):
            return _time(step)

    def ours() -> float:
        recorder = OpRecorder(torch.device("cpu"))
        recorder.recording = True

        def marked() -> None:
            recorder.begin()
            step()
            recorder.end()

        taken = _time(marked)
        recorder.stop()
        return taken

    step()
    pairs = [(plain(), ours()) for _ in range(rounds)]
    print(f"profiled steps take {statistics.median(ours / plain for plain, ours in pairs):.3f} of torch.profiler's")
    return 0


def _time(step: Callable[[], None]) -> float:
    times = []
    for _ in range(5):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return statistics.median(times)
