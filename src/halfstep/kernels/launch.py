"""The choice of a backend for a kernel and a device, and the call that runs it."""

from __future__ import annotations

import importlib.util
import os
from contextvars import ContextVar

import torch

from ..core.errors import ArgumentValueError, UsageError
from .expr import ElementwiseKernel
from .tensor_table import Launcher, Scalars, TensorTable

__all__ = ["BACKENDS", "backend", "backend_for", "launch"]

BACKENDS = ("auto", "eager", "torch", "compiled", "triton")
"""``auto``: triton on CUDA and compiled on the CPU where they can run; otherwise torch on the CPU, and eager."""

_chosen: ContextVar[str | None] = ContextVar("halfstep_backend", default=None)


class backend:  # noqa: N801 - reads as a verb, as torch.set_grad_enabled does
    """Choose the backend of multi-tensor operations, from now on or for a ``with`` block.

    ``backend("eager")`` sets the backend in this thread or context; as a context manager it restores the previous
    choice. Without a choice the environment variable ``HALFSTEP_BACKEND`` decides.

    Args:
        name: one of ``BACKENDS``.

    Raises:
        ArgumentValueError: for an unknown name.
    """

    def __init__(self, name: str) -> None:
        self._token = _chosen.set(_known(name, "backend(...)"))

    def __enter__(self) -> backend:
        return self

    def __exit__(self, *error: object) -> None:
        _chosen.reset(self._token)


def backend_for(device: torch.device | str) -> str:
    """Return the backend for operations on a device: ``"eager"``, ``"torch"``, ``"compiled"`` or ``"triton"``.

    Raises:
        UsageError: if the chosen backend cannot run on the device.
    """
    kind = torch.device(device).type
    name = _chosen.get() or _known(os.environ.get("HALFSTEP_BACKEND") or "auto", "HALFSTEP_BACKEND")
    if name == "auto":
        if kind == "cuda" and _has_triton():
            return "triton"
        name = "compiled" if kind == "cpu" else "eager"
    if name in ("compiled", "torch") and kind != "cpu":
        raise UsageError(f"backend={name!r} runs on the CPU, not on {kind}; choose 'auto', 'triton' or 'eager'.")
    if name == "compiled":
        from .backends import compiler

        if not compiler.available():
            return "torch"
    if name == "triton":
        if not _has_triton():
            raise UsageError("backend='triton' needs the triton package; pip install triton, or choose 'auto'.")
        if kind != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            raise UsageError(
                f"backend='triton' runs on CUDA, not on {kind}; choose 'auto', or set TRITON_INTERPRET=1 before the "
                "first use to have Triton's interpreter check its numerics on a CPU."
            )
    return name


def launch(
    table: TensorTable,
    kernel: ElementwiseKernel,
    scalars: Scalars,
    *,
    skip: torch.Tensor | None = None,
    found: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run a kernel over the rows of a table on the current backend; see ``Launcher`` for arguments and result.

    The prepared launcher is cached in the table under the choice of ``backend``. So the environment is read only for a
    new table, because a read takes longer than a kernel on a small tensor.
    """
    key = _chosen.get(), kernel
    launcher = table.launchers.get(key)
    if launcher is None:
        launcher = table.launchers[key] = _launcher(backend_for(table.device), kernel, table)
    return launcher(scalars, skip=skip, found=found)


def _launcher(name: str, kernel: ElementwiseKernel, table: TensorTable) -> Launcher:
    """Prepare a kernel for a table on a backend. Backends are imported on first use."""
    if name == "compiled":
        from .backends import compiler
        from .backends.cpp import CppLauncher

        try:
            return CppLauncher(kernel, table)
        except compiler.FAILURES as error:  # full disk, no memory, a machine that changes while the process runs
            compiler.give_up(error)
            name = "torch"
    if name == "triton":
        from .backends.triton import TritonLauncher

        return TritonLauncher(kernel, table)
    if name == "torch":
        from .backends import torch_fused

        return torch_fused.launcher(kernel, table)
    from .backends.foreach import ForeachLauncher

    return ForeachLauncher(kernel, table)


def _known(name: str, where: str) -> str:
    if name not in BACKENDS:
        raise ArgumentValueError(f"{where}: {name!r} is no backend; choose one of {', '.join(BACKENDS)}.")
    return name


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
