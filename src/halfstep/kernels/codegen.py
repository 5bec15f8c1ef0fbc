"""The common part of the backends that generate source code: the layout of columns, and the launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .expr import ElementwiseKernel, trace
from .storage import Storage
from .tensor_table import Launcher, ScalarTable, TensorTable

__all__ = ["GeneratedLauncher", "Layout", "layout_of"]


@dataclass(frozen=True)
class Layout:
    """The arrangement of a table in memory, which generated code depends on besides its kernel.

    Attributes:
        columns: for each column its name, the index of its first part in the table of pointers, and its storage.
        scalars: the lines of the scalar table: the kernel's scalars, and ``seed`` for stochastic rounding.
        compute_dtype: float32 or float64.
    """

    columns: tuple[tuple[str, int, Storage], ...]
    scalars: tuple[str, ...]
    compute_dtype: torch.dtype


def layout_of(kernel: ElementwiseKernel, table: TensorTable) -> Layout:
    """Find the columns of a kernel in a table, and list its scalars."""
    slots, traced = table.slots, trace(kernel)
    columns = tuple((name, slots[name].start, table.columns[name][0]) for name in traced.columns)
    random = any(storage.kind == "stochastic" for _, _, storage in columns)
    return Layout(columns, (*traced.scalars, *(("seed",) if random else ())), table.compute_dtype)


class GeneratedLauncher(Launcher):
    """A generated kernel prepared for a table. A backend has the call.

    Args:
        kernel: the kernel.
        layout: the layout of the table.
        table: the table of rows.
        chunk: the number of elements of a row in one unit of work.
    """

    def __init__(self, kernel: ElementwiseKernel, layout: Layout, table: TensorTable, chunk: int) -> None:
        self._rows, self._finds = len(table), len(kernel.squares) > 0
        self._pointers = pointers = table.pointers(chunk)
        self._scalars = ScalarTable(layout.scalars, len(table), table.compute_dtype, table.device)
        self._partial = torch.zeros(len(kernel.squares), pointers.chunks, dtype=torch.float64, device=table.device)
        self._results = torch.zeros(len(kernel.squares), len(table), dtype=torch.float64, device=table.device)
        self._written = [part for name in trace(kernel).stores for part in table.slots[name]]
