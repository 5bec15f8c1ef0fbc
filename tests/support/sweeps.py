"""Sweeps over a table of torch's: a command that prints what it finds as JSON, and the run of it from a test.

A sweep runs in a process of its own, since ``torch.testing._internal`` changes settings of torch when it is imported.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from tests.support.backends import seed_without_traces
from tests.support.python import python

__all__ = ["Found", "command", "run"]

Found = dict[str, dict[str, Any]]
"""For each way: ``cases``, how many there were; ``refused``, the names that halfstep refuses; ``wrong``, the problems
of each other name that is not right."""


def command(sweep: Callable[[list[str], frozenset[str], bool], Found], hows: Iterable[str]) -> None:
    """Print what ``sweep(hows, names, every)`` returns for the arguments of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("how", choices=hows, nargs="+")
    parser.add_argument("--all", action="store_true", help="every case, and not a sample")
    parser.add_argument("--names", default="")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    seed_without_traces()
    names = frozenset(filter(None, options.names.split(",")))
    json.dump(sweep(options.how, names, options.all), sys.stdout, indent=1)


def run(name: str, hows: Iterable[str], request: pytest.FixtureRequest) -> Found:
    """What a sweep finds: in its sample, or with ``--combinations all`` in every case."""
    every = ["--all"] if request.config.getoption("combinations") == "all" else []
    result = python("-m", f"tests.support.{name}", *hows, *every, quiet=True, timeout=3000.0 if every else 280.0)
    assert result.returncode == 0, result.stderr
    found: Found = json.loads(result.stdout)
    return found
