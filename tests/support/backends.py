"""Tests of what only one backend has: where it cannot run they skip, and say why."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch

from halfstep import kernels
from halfstep.kernels.backends import compiler

__all__ = [
    *("needs_compiler", "needs_interpreter", "needs_triton", "on_each_backend", "seed_without_traces"),
    "skip_without_compiler",
]

_REASON = "no C++ compiler: halfstep runs on torch's own steps here"

needs_compiler = pytest.mark.skipif(not compiler.available(), reason=_REASON)
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no triton package")
needs_interpreter = pytest.mark.skipif(
    needs_triton.args[0] or torch.cuda.is_available(), reason="Triton does not interpret here"
)
"""Of kernels that run in Triton's interpreter, on a CPU."""


def seed_without_traces() -> None:
    """Seed the CPU alone where there is no accelerator: torch keeps a stack trace for each absent kind, 1 ms."""
    if not torch.accelerator.is_available():
        torch.manual_seed = torch.default_generator.manual_seed


def skip_without_compiler(needed: bool = True) -> None:
    """Skip the rest of a test, if it needs what only the compiled backend has."""
    if needed and not compiler.available():
        pytest.skip(_REASON)


@pytest.fixture(name="on", params=["eager", "torch", "compiled"], autouse=True)
def on_each_backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run each test of a module that imports this fixture on every backend for the CPU."""
    skip_without_compiler(request.param == "compiled")
    with kernels.backend(request.param):
        yield request.param
