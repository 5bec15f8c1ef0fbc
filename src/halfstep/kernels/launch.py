"""Which backend runs a pass on which device."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from contextvars import ContextVar
from types import TracebackType

import torch

from ..core.errors import ArgumentValueError, UsageError
from .expr import Pass
from .tensor_table import Batch, Launch

__all__ = ["BACKENDS", "backend", "backend_for", "launcher"]

BACKENDS = ("auto", "eager", "compiled", "triton")
"""``auto``: triton on CUDA and compiled on the CPU where they can run, eager otherwise."""

_chosen: ContextVar[str | None] = ContextVar("halfstep_backend", default=None)


class backend:  # noqa: N801 - reads as a verb, as torch.set_grad_enabled does
    """Choose the backend of multi-tensor operations, from now on or for a ``with`` block.

    ``backend("eager")`` sets it in this thread or context; as a context manager it restores what was there.
    ``HALFSTEP_BACKEND`` in the environment is the choice where nobody made one.

    Args:
        name: one of ``BACKENDS``.

    Raises:
        ArgumentValueError: for another name.
    """

    def __init__(self, name: str) -> None:
        self._token = _chosen.set(_known(name, "backend(...)"))

    def __enter__(self) -> backend:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _chosen.reset(self._token)


def backend_for(device: torch.device | str) -> str:
    """The backend that operations on a device run on: ``"eager"``, ``"compiled"`` or ``"triton"``.

    Raises:
        UsageError: if the chosen one cannot run there.
    """
    kind = torch.device(device).type
    name = _chosen.get() or _known(os.environ.get("HALFSTEP_BACKEND") or "auto", "HALFSTEP_BACKEND")
    if name == "auto":
        if kind == "cuda" and _has_triton():
            return "triton"
        return "compiled" if kind == "cpu" and _has_compiler() else "eager"
    if name == "compiled":
        if kind != "cpu":
            raise UsageError(f"backend='compiled' runs on the CPU, not on {kind}; choose 'auto', 'triton' or 'eager'.")
        return "compiled" if _has_compiler() else "eager"
    if name == "triton":
        if not _has_triton():
            raise UsageError("backend='triton' needs the triton package; pip install triton, or choose 'auto'.")
        if kind != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            raise UsageError(
                f"backend='triton' runs on CUDA, not on {kind}; choose 'auto', or set TRITON_INTERPRET=1 before the "
                "first use to have Triton's interpreter check its numerics on a CPU."
            )
    return name


def launcher(device: torch.device) -> tuple[str, Callable[[Pass, Batch], Launch]]:
    """The name of a device's backend and what makes a pass ready on it. Backends are imported when first used."""
    name = backend_for(device)
    if name == "compiled":
        from .backends.cpp import CompiledLaunch

        return name, CompiledLaunch
    if name == "triton":
        from .backends.triton import TritonLaunch

        return name, TritonLaunch
    from .backends.foreach import ForeachLaunch

    return name, ForeachLaunch


def _known(name: str, where: str) -> str:
    if name not in BACKENDS:
        raise ArgumentValueError(f"{where}: {name!r} is no backend; choose one of {', '.join(BACKENDS)}.")
    return name


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _has_compiler() -> bool:
    from .backends import compiler as cxx

    return cxx.available()
