"""``python -m tests.fuzz --minutes 10 [NAME ...]``: run the machines for so long each, with new cases every time.

What fails is printed as a short program, and the exit status is 1. ``make fuzz MINUTES=10`` does the same.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
import warnings
from random import randrange

import torch
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from halfstep.amp import PrecisionWarning

from . import MACHINES


def main() -> int:
    """Run the machines; 1 if one of them found something."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="for each machine")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(MACHINES)}; all if none is given")
    given = parser.parse_args()
    unknown = set(given.names) - set(MACHINES)
    if unknown:
        parser.error(f"there is no machine {', '.join(sorted(unknown))}; there are {', '.join(MACHINES)}")
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", PrecisionWarning)
    found = 0
    for name in given.names or MACHINES:
        machine = MACHINES[name]
        end, first = time.monotonic() + 60 * given.minutes, machine.cases
        try:
            while time.monotonic() < end:
                made = seed(randrange(2**32))(type(name, (machine,), {}))
                run_state_machine_as_test(made, settings=cases(50))  # type: ignore[no-untyped-call, unused-ignore]
        except Exception:  # noqa: BLE001 - the other machines run all the same
            traceback.print_exc()
            found = 1
        sys.stdout.write(f"{name}: {machine.cases - first} cases{', one of them fails' if found else ''}\n")
        sys.stdout.flush()
    return found


def cases(count: int) -> settings:
    """So many cases, whatever they take."""
    return settings(
        max_examples=count,
        stateful_step_count=20,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


if __name__ == "__main__":
    sys.exit(main())
