"""Rows of tensors that one pass covers at once, and what generated kernels need to find them: pointers and chunks.

A row is a parameter with its gradient and state; a column is the same thing of every row. ``Batch.run`` hands a
``Pass`` to the backend in use (``select``) and keeps what that made ready for the next step.
"""

from __future__ import annotations

import array
import itertools
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from .expr import Pass
from .storage import Storage, dense

__all__ = ["Batch", "Launch", "ScalarTable", "Scalars", "Table"]

Scalars = Mapping[str, "float | torch.Tensor"]
"""A number for every row of a batch: a float or 0-dim tensor for all of them, or a tensor of shape [rows]."""

Columns = Mapping[str, tuple[Storage, tuple[list[torch.Tensor], ...]]]


class Launch(Protocol):
    """A pass made ready for a batch."""

    def __call__(
        self, scalars: Scalars, *, skip: torch.Tensor | None = None, found: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run it.

        Args:
            scalars: the numbers the pass names, and ``seed`` (int32, shape [rows]) for a stochastic column.
            skip: 0-dim float32 tensor on the batch's device; nothing is written where it is not 0.
            found: 0-dim float32 tensor on the batch's device, set to 1.0 if a checked value is inf or NaN.

        Returns:
            The sums of squares the pass names: float64, shape [sums, rows].
        """


class Batch:
    """Columns of equal length, all on one device.

    Args:
        columns: name -> (storage, one list of tensors for each of the storage's parts). The first may be renewed.
        compute_dtype: float32, or float64 if a column holds that; worked out when not given.
    """

    def __init__(self, columns: Columns, compute_dtype: torch.dtype | None = None) -> None:
        self.columns = dict(columns)
        first = next(iter(self.columns.values()))[1][0]
        self._strides = [t.stride() for t in first]
        self._length = len(first)
        self.device = first[0].device if first else torch.device("cpu")
        doubles = any(torch.float64 in storage.dtypes for storage, _ in self.columns.values())
        self.compute_dtype = compute_dtype or (torch.float64 if doubles else torch.float32)
        self._launches: dict[tuple[str, Pass], Launch] = {}
        self._tables: dict[int, Table] = {}

    @classmethod
    def of(cls, **columns: Sequence[torch.Tensor]) -> Batch:
        """A batch of plain tensors, one dtype a column."""
        return cls({name: (dense(tensors[0].dtype), (list(tensors),)) for name, tensors in columns.items()})

    def __len__(self) -> int:
        return self._length

    @property
    def slots(self) -> dict[str, int]:
        """Column -> number of its first part, as the tables of pointers count them."""
        widths = [len(parts) for _, parts in self.columns.values()]
        return dict(zip(self.columns, itertools.accumulate(widths, initial=0), strict=False))

    def run(
        self, pass_: Pass, scalars: Scalars, *, skip: torch.Tensor | None = None, found: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run a pass over the rows with the backend in use; arguments and result as in ``Launch``."""
        from .launch import launcher  # the backends import this module

        name, make = launcher(self.device)
        launch = self._launches.get((name, pass_))
        if launch is None:
            launch = self._launches[name, pass_] = make(pass_, self)
        return launch(scalars, skip=skip, found=found)

    def renew(self, tensors: list[torch.Tensor]) -> bool:
        """Put new tensors of the same kind into the first column: usually this step's gradients.

        Returns:
            False if they are of another kind (dtype, layout), or if another column's storage was replaced under us:
            then a new batch is needed.
        """
        name = next(iter(self.columns))
        storage = self.columns[name][0]
        dtype = storage.dtypes[0]
        for tensor, strides in zip(tensors, self._strides, strict=True):
            if tensor.dtype is not dtype or tensor.layout is not torch.strided or tensor.stride() != strides:
                return False
        self.columns[name] = (storage, (tensors,))
        return all(table.renew(tensors) for table in self._tables.values())

    def table(self, chunk: int) -> Table:
        """The pointers and chunks of this batch, made once for each chunk size."""
        if chunk not in self._tables:
            self._tables[chunk] = Table(self, chunk)
        return self._tables[chunk]


class Table:
    """Where the rows of a batch lie in memory, as generated kernels read it.

    A row whose tensors do not all lie in memory in the same dense order is staged: kernels work on contiguous copies
    of it, written back after the pass.

    Attributes:
        chunks: how many pieces the rows are cut into.
        row, start, count: int64 tensors of shape [chunks]: the row, first element and length of each piece.
        first: int64, shape [rows + 1]: the first chunk of each row.
        aligned: every pointer is a multiple of 16 bytes.
    """

    def __init__(self, batch: Batch, chunk: int) -> None:
        self.device = batch.device
        self._lists = [list(part) for _, parts in batch.columns.values() for part in parts]
        self._staged: dict[int, list[torch.Tensor]] = {
            i: [torch.empty_like(t, memory_format=torch.contiguous_format) for t in row]
            for i, row in enumerate(zip(*self._lists, strict=True))
            if not _alike(row)
        }
        sizes = torch.tensor([t.numel() for t in self._lists[0]], dtype=torch.int64)
        pieces = (sizes + chunk - 1) // chunk
        first = torch.zeros(len(sizes) + 1, dtype=torch.int64)
        torch.cumsum(pieces, 0, out=first[1:])
        row = torch.repeat_interleave(torch.arange(len(sizes)), pieces)
        start = (torch.arange(len(row)) - first[row]) * chunk
        count = (sizes[row] - start).clamp(max=chunk)
        self.chunks = len(row)
        self.row, self.start, self.count, self.first = (t.to(self.device) for t in (row, start, count, first))
        self.pointers = torch.empty(0, dtype=torch.int64)
        self.aligned = False
        self._addresses: list[list[int]] = []
        for part in range(len(self._lists)):
            self._addresses.append(self._read(part))
        self._write()

    def renew(self, tensors: list[torch.Tensor]) -> bool:
        """Take new tensors of the first column, and find out whether any other has moved.

        Returns:
            False if another column's storage was replaced under us: its layout is not known any more.
        """
        self._lists[0] = tensors
        moved = False
        for part in range(len(self._lists)):
            addresses = self._read(part)
            if addresses != self._addresses[part]:
                if part != 0:
                    return False
                self._addresses[part], moved = addresses, True
        if moved:
            self._write()
        return True

    def stage_in(self) -> None:
        """Before a pass: bring the staged rows' values into their contiguous copies."""
        for i, copies in self._staged.items():
            for part, scratch in enumerate(copies):
                scratch.copy_(self._lists[part][i])

    def stage_out(self, parts: Sequence[int]) -> None:
        """After a pass: write the staged rows' values back from the parts it wrote."""
        for i, copies in self._staged.items():
            for part in parts:
                self._lists[part][i].copy_(copies[part])

    def _read(self, part: int) -> list[int]:
        addresses = [t.data_ptr() for t in self._lists[part]]
        for i, copies in self._staged.items():
            addresses[i] = copies[part].data_ptr()
        return addresses

    def _write(self) -> None:
        flat = [address for addresses in self._addresses for address in addresses]
        self.aligned = not any(map((15).__and__, flat))
        if not flat:
            return
        host = torch.frombuffer(array.array("q", flat), dtype=torch.int64)
        # A pinned buffer is kept until its copy has run, by torch's caching host allocator.
        self.pointers = host.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else host


class ScalarTable:
    """The numbers of a pass, one line for each name and one entry for each row, kept on the device.

    Args:
        names: in the order in which the kernel reads them.
        rows: length of a line.
        dtype: float32 or float64.
        device: where the kernel runs.
    """

    def __init__(self, names: Sequence[str], rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self.values = torch.zeros(max(len(names), 1), rows, dtype=dtype, device=device)
        self._lines = dict(zip(names, self.values.unbind(), strict=False))
        self._last: dict[str, float] = {}

    def fill(self, scalars: Scalars) -> torch.Tensor:
        """Write this step's numbers; those of the host only where they changed. Reads nothing back."""
        for name, line in self._lines.items():
            value = scalars[name]
            if isinstance(value, torch.Tensor):
                (line.view(torch.int32) if value.dtype is torch.int32 else line).copy_(value, non_blocking=True)
                self._last.pop(name, None)
            elif self._last.get(name) != value:
                line.fill_(value)
                self._last[name] = value
        return self.values


def _alike(row: Sequence[torch.Tensor]) -> bool:
    """Whether the tensors fill their memory without holes and in the same order."""
    if all(t.is_contiguous() for t in row):
        return True
    strides = row[0].stride()
    return all(t.stride() == strides for t in row) and _dense(row[0])


def _dense(tensor: torch.Tensor) -> bool:
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True
