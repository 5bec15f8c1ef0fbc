"""Planted faults that ``halfstep.search`` finds: exactly these, or one unit more, and in how many guarded runs.

A CNN, a transformer and an LSTM have 1 to 4 faults each, of six sorts, at places that the seed chooses. They run at
O2 in float16.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from pathlib import Path

import halfstep


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=100, help="models of each kind (default 100)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures as JSON")


def run(args: argparse.Namespace) -> int:
    from tests.searching.planted import KINDS, planted, step  # what the tests of the search use

    warnings.simplefilter("ignore")
    figures = {}
    for kind in KINDS:
        exact = more = within = 0
        begin = time.perf_counter()
        for seed in range(args.seeds):
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
        Path(args.json).write_text(json.dumps({"seeds": args.seeds, "kinds": figures}, indent=1))
    return 0
