"""``python -m tests.fuzz --minutes 10 [NAME ...]``: run the machines for so long each, with new cases every time.

What fails is printed as a short program, and the exit status is 1. ``make fuzz MINUTES=10`` does the same.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
import warnings
from random import randrange

import torch
from hypothesis import seed
from hypothesis.stateful import run_state_machine_as_test

from halfstep.amp import PrecisionWarning

from . import MACHINES, options


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
    logging.getLogger("halfstep").setLevel(logging.ERROR)
    failed = []
    for name in given.names or MACHINES:
        machine = MACHINES[name]
        end, first = time.monotonic() + 60 * given.minutes, machine.cases
        try:
            while time.monotonic() < end:
                made = seed(randrange(2**32))(type(name, (machine,), {}))
                run_state_machine_as_test(made, settings=options(machine, 50))  # type: ignore[no-untyped-call, unused-ignore]
        except Exception:  # noqa: BLE001 - the other machines run all the same
            traceback.print_exc()
            failed.append(name)
        ending = ", one of them fails" if name in failed else ""
        sys.stdout.write(f"{name}: {machine.cases - first} cases{ending}\n")
        sys.stdout.flush()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
