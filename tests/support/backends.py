"""Tests of what only the compiled backend has: on a machine without a C++ compiler they skip, and say why."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from halfstep import kernels
from halfstep.kernels.backends import compiler

__all__ = ["needs_compiler", "on_each_backend", "skip_without_compiler"]

_REASON = "no C++ compiler: halfstep runs on torch's own steps here"

needs_compiler = pytest.mark.skipif(not compiler.available(), reason=_REASON)


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
