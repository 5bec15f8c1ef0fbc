"""CUDA tensors without a GPU: what dtype an op has there, and whether a step reads the host, needs no kernel to run.

Under torch's ``FakeTensorMode`` a tensor has a device, a dtype and a shape and no values. Ops dispatch as on the
device, through CUDA autocast with its own lists, and whatever would read a value (``.item()``, ``bool(tensor)``,
``.tolist()``) raises ``DataDependentOutputException``: where a GPU would make the host wait, a fake one fails.

A build of torch without CUDA has no device guard for it, and copies, indexing and gradients ask for one. torch puts a
guard that does nothing in its place, but (2.11 to 2.13) only in builds with CUDA; ``fake_cuda`` does the same for the
others. What stays impossible is a backward pass, which asks for streams: write ``.grad`` by hand.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

__all__ = ["DEVICES", "FAKE", "NOT_ON_FAKES", "READS_THE_HOST", "fake_cuda", "of_ops", "on", "skip_unless_it_runs"]

FAKE = "fake cuda"
DEVICES = ["cpu", FAKE, *([pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else [])]
"""The devices of a row that asks for dtypes: the fake stands in for a GPU, and a real one is asked as well."""

READS_THE_HOST = (DataDependentOutputException, DynamicOutputShapeException)
"""What a fake tensor raises where a real one would make the host wait for a value."""

_NO_SHAPES = "torch has no code that gives only the shape of its result"
_READS = "torch's own code reads a value"
_GIVES = "what it gives depends on the values"
NOT_ON_FAKES = {
    **dict.fromkeys(("gru", "gru_cell", "ctc_loss", "geqrf"), _NO_SHAPES),
    **dict.fromkeys(("cov", "corrcoef", "gaussian_nll_loss", "istft"), _READS),
    **dict.fromkeys(("linalg_lstsq", "equal", "allclose"), _GIVES),
    "grouped_mm": "torch's code that gives the shape of its result takes bfloat16 alone",
}
"""Ops that cannot run on fake tensors, whoever casts them; a real GPU runs them."""

_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>)
}
"""


@functools.cache
def _guard() -> None:
    """Give this process a device guard for CUDA that does nothing; a second to compile."""
    if torch.backends.cuda.is_built():
        return
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        pytest.skip("no CUDA device, and no C++ compiler for the device guard of a fake one")
    home = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as scratch:
        source, library = Path(scratch) / "guard.cpp", Path(scratch) / "guard.so"
        source.write_text(_GUARD)
        flags = ["-std=c++20", "-shared", "-fPIC", f"-I{home / 'include'}", f"-L{home / 'lib'}", "-lc10"]
        built = subprocess.run([compiler, str(source), "-o", str(library), *flags], capture_output=True, text=True)
        if built.returncode:
            pytest.skip(
                f"no CUDA device, and {compiler} cannot build the device guard of a fake one: {built.stderr[:200]}"
            )
        ctypes.CDLL(str(library))


@functools.cache
def _mode() -> FakeTensorMode:
    """One mode for all rows: it takes a stack trace when it is made, which costs more than a row."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def fake_cuda() -> Iterator[str]:
    """A block in which tensors made on "cuda" are fake ones; gives the name of the device."""
    _guard()
    # Recurrent modules warn where a tensor is on CUDA and torch has no cuDNN.
    with _mode(), torch.backends.cudnn.flags(enabled=False):
        yield "cuda"


@contextmanager
def on(device: str) -> Iterator[str]:
    """A block for one of ``DEVICES``, in which tensors are made there; gives the name that torch knows it by."""
    with fake_cuda() if device == FAKE else nullcontext(device) as name, torch.device(name):
        yield name


def skip_unless_it_runs(op: str, device: str) -> None:
    """Skip, saying why, where an op cannot run on fake tensors."""
    if device == FAKE and op in NOT_ON_FAKES:
        pytest.skip(f"{op} does not run on fake tensors: {NOT_ON_FAKES[op]}")


def of_ops(ops: Iterable[str]) -> list[Any]:
    """The parameters of a table over ops and ``DEVICES``: an op that is skipped on fakes keeps all its other cases."""
    return [pytest.param(op, marks=pytest.mark.every_combination) if op in NOT_ON_FAKES else op for op in ops]
