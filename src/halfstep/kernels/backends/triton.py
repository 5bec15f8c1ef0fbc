"""The CUDA backend: prints a kernel for Triton over a table of pointers, with one launch for a table of any size.

Under ``TRITON_INTERPRET=1`` the same kernels run slowly on a CPU, so that tests check their numerics without a GPU.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
from pathlib import Path
from typing import Any

import torch

from ...core.files import generated, write_whole
from ..codegen import GeneratedLauncher, Layout, layout_of
from ..expr import ElementwiseKernel
from ..tensor_table import Scalars, TensorTable
from . import launch_config
from .triton_source import source

__all__ = ["OPTIONS", "TritonLauncher"]

OPTIONS = {"enable_fp_fusion": False}
"""Options of Triton's compiler. Fusion would round a multiply and an add once, unlike the other backends."""


class TritonLauncher(GeneratedLauncher):
    """One kernel over one table, in one launch. The last program of a row adds up its sums of squares in order."""

    def __init__(self, kernel: ElementwiseKernel, table: TensorTable) -> None:
        layout = layout_of(kernel, table)
        self._module = _module(kernel, layout, os.environ.get("TRITON_INTERPRET") == "1")
        self._config = launch_config.default(kernel)
        super().__init__(kernel, layout, table, self._config.elements)
        self._zero = torch.zeros((), dtype=torch.float32, device=table.device)
        self._unseen = torch.zeros_like(self._zero)  # target of checks without a flag
        self._done = torch.zeros(len(table), dtype=torch.int32, device=table.device)

    def __call__(
        self, scalars: Scalars, *, skip: torch.Tensor | None = None, found: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run the kernel; see ``Launcher``."""
        pointers = self._pointers
        results = torch.zeros_like(self._results) if self._finds else self._results
        if not pointers.chunks:
            return results
        pointers.memory.stage_in()
        numbers = self._scalars.fill(scalars)
        with torch.cuda.device_of(self._zero):  # Triton launches on the current device
            self._module.kernel[(pointers.chunks,)](
                pointers.row,
                pointers.start,
                pointers.count,
                pointers.first,
                pointers.memory.values,
                numbers,
                self._zero if skip is None else skip,
                self._unseen if found is None else found,
                self._partial,
                results,
                self._done,
                self._rows,
                pointers.chunks,
                BLOCK=self._config.elements,
                num_warps=self._config.warps,
                **OPTIONS,
            )
        pointers.memory.stage_out(self._written)
        return results


@functools.cache
def _module(kernel: ElementwiseKernel, layout: Layout, interpreted: bool) -> Any:
    """Load the generated module; from then on Triton either compiles or interprets it.

    The module is written to the cache because Triton reads the source of its kernels from a file.
    """
    text = source(kernel, layout)
    stem = f"{kernel.name}-{hashlib.sha256(text.encode()).hexdigest()[:20]}"
    return generated(stem, ".py", lambda path: write_whole(path, text), _imported)


def _imported(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"halfstep_kernels_{path.stem.replace('-', '_')}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
