"""Rows of tensors that a kernel covers at once, and what generated kernels need to find them: pointers and chunks.

A row is a parameter with its gradient and state; a column is the same thing of every row. ``launch`` runs a kernel on
a table.
"""

from __future__ import annotations

import array
import ctypes
import itertools
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, Protocol

import torch

from .expr import ElementwiseKernel
from .shards import ORDINARY, locals_of, placements_of
from .storage import Storage, dense

__all__ = [
    "AddressTable",
    "Column",
    "Launcher",
    "Number",
    "PointerTable",
    "ScalarTable",
    "Scalars",
    "TensorTable",
    "of_rows",
]

_KIND = attrgetter("dtype", "layout")

Number = float | torch.Tensor

Scalars = Mapping[str, Number]
"""A number for every row of a table: a float or 0-dim tensor for all of them, or a tensor of shape [rows]."""


def of_rows(numbers: Number, rows: Sequence[int]) -> list[torch.Tensor]:
    """The number of each of some rows, as 0-dim float32 tensors."""
    if not isinstance(numbers, torch.Tensor) or numbers.dim() == 0:
        return [torch.as_tensor(numbers, dtype=torch.float32, device=getattr(numbers, "device", "cpu"))] * len(rows)
    return list(numbers.float()[list(rows)].unbind())


Column = tuple[Storage, tuple[list[torch.Tensor], ...]]
"""How its values are stored, and one list of tensors for each part of the storage."""


class Launcher(Protocol):
    """A kernel made ready for a table by one backend."""

    def __call__(
        self, scalars: Scalars, *, skip: torch.Tensor | None = None, found: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run it.

        Args:
            scalars: the numbers the kernel names, and ``seed`` (int32, shape [rows]) for a stochastic column. Others
                are ignored.
            skip: 0-dim float32 tensor on the table's device; nothing is written where it is not 0.
            found: 0-dim float32 tensor on the table's device, set to 1.0 if a checked value is inf or NaN.

        Returns:
            Float64, shape [kernel.results, rows]: the sums of squares the kernel names, the numbers of zeros, and the
            largest magnitudes.
        """


class TensorTable:
    """Columns of equal length, all on one device. Of sharded tensors it holds the parts that lie here.

    Args:
        columns: by name, of plain and sharded tensors in any mixture. The tensors of the first column may be renewed.
        compute_dtype: float32, or float64 if a column holds that; worked out when not given.

    Attributes:
        launchers: the kernels made ready for this table, by the backend that was asked for (None for none) and kernel.
    """

    def __init__(self, columns: Mapping[str, Column], compute_dtype: torch.dtype | None = None) -> None:
        self._placements = placements_of(next(iter(columns.values()))[1][0])
        self.columns = {name: (storage, tuple(map(locals_of, parts))) for name, (storage, parts) in columns.items()}
        first = next(iter(self.columns.values()))[1][0]
        self._strides = [t.stride() for t in first]
        self._length = len(first)
        self.device = first[0].device if first else torch.device("cpu")
        doubles = any(torch.float64 in storage.dtypes for storage, _ in self.columns.values())
        self.compute_dtype = compute_dtype or (torch.float64 if doubles else torch.float32)
        self.launchers: dict[tuple[str | None, ElementwiseKernel], Launcher] = {}
        self._addresses: AddressTable | None = None
        self._pointers: dict[int, PointerTable] = {}

    @classmethod
    def of(cls, **columns: Sequence[torch.Tensor]) -> TensorTable:
        """A table of columns that hold one dtype each."""
        return cls({name: (dense(tensors[0].dtype), (list(tensors),)) for name, tensors in columns.items()})

    def beside(self, columns: Mapping[str, list[torch.Tensor]]) -> TensorTable:
        """A table of the columns of this one and of others, of tensors that hold one dtype each."""
        more = {name: (dense(tensors[0].dtype), (tensors,)) for name, tensors in columns.items()}
        return TensorTable({**self.columns, **more}, self.compute_dtype)

    def __len__(self) -> int:
        return self._length

    @property
    def slots(self) -> dict[str, int]:
        """Column -> number of its first part, as tables of pointers count them."""
        widths = [len(parts) for _, parts in self.columns.values()]
        return dict(zip(self.columns, itertools.accumulate(widths, initial=0), strict=False))

    def renew(self, tensors: list[torch.Tensor]) -> bool:
        """Put new tensors of the same kind into the first column: usually this step's gradients.

        Returns:
            False if they are of another kind (dtype, layout, placement), or if the memory of another column was
            replaced. Then a new table is needed.
        """
        if self._placements or not ORDINARY.issuperset(map(type, tensors)):
            if placements_of(tensors) != self._placements:
                return False
            tensors = locals_of(tensors)
        name = next(iter(self.columns))
        storage = self.columns[name][0]
        # A step asks this of every gradient: so the loops are those of ``map``.
        if not {*map(_KIND, tensors)} <= {(storage.dtypes[0], torch.strided)}:
            return False
        if list(map(torch.Tensor.stride, tensors)) != self._strides:
            return False
        self.columns[name] = (storage, (tensors,))
        return self._addresses is None or self._addresses.update(tensors)

    def release(self) -> None:
        """Let go of the first column, which ``renew`` brings anew: so gradients that are cleared are freed."""
        name = next(iter(self.columns))
        self.columns[name] = (self.columns[name][0], ([],))
        if self._addresses is not None:
            self._addresses.parts[0] = []

    def pointers(self, chunk: int) -> PointerTable:
        """The pointers and chunks of this table, made once for each chunk size; all of them share the addresses."""
        if self._addresses is None:
            self._addresses = AddressTable(self)
        if chunk not in self._pointers:
            self._pointers[chunk] = PointerTable(self._addresses, chunk)
        return self._pointers[chunk]


class AddressTable:
    """Where the tensors of a table begin in memory.

    A row whose tensors do not all lie in memory in the same dense order is staged: kernels work on copies of it that
    do, written back after they ran. They have the order of its 8-bit codes, whose blocks are runs in memory; without
    codes they are contiguous.

    Attributes:
        device: where the tensors lie.
        lengths: how many elements each row has.
        parts: the tensors of each part of each column, one list for a part. The first list is empty between steps.
        staged: the copies of the tensors of each row that is staged, by the number of the row; None for a tensor that
            has not one element for each value, which is used where it lies.
        values: int64, shape [parts * rows]: the addresses of the tensors of each part of each column, on the device.
    """

    def __init__(self, table: TensorTable) -> None:
        self.device = table.device
        self.parts = [list(part) for _, parts in table.columns.values() for part in parts]
        # Of each part, whether it has one element for each value; and where 8-bit codes are.
        storages = [storage for storage, _ in table.columns.values()]
        alike = [place < each.elementwise for each in storages for place in range(len(each.dtypes))]
        codes = next((i for i, part in enumerate(self.parts) if part and part[0].dtype is torch.uint8), None)
        self.staged: dict[int, list[torch.Tensor | None]] = {
            i: _staging(row, alike, None if codes is None else row[codes])
            for i, row in enumerate(zip(*self.parts, strict=True))
            if not _alike(list(itertools.compress(row, alike)))
        }
        self.lengths = [t.numel() for t in self.parts[0]]
        self.values = torch.empty(0, dtype=torch.int64, device="cpu")
        self._replayed: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._known: list[list[int]] = []
        self._flat = array.array("q")  # on a CPU it is the memory of ``values``
        self.update(self.parts[0])

    def update(self, tensors: list[torch.Tensor]) -> bool:
        """Take new tensors of the first column, and write their addresses where they are not the known ones.

        Returns:
            False if the memory of another column was replaced: its layout may have changed, too.
        """
        self.parts[0] = tensors
        found = [list(map(torch.Tensor.data_ptr, part)) for part in self.parts]
        for i, copies in self.staged.items():
            for addresses, scratch in zip(found, copies, strict=True):
                if scratch is not None:
                    addresses[i] = scratch.data_ptr()
        if found == self._known:
            return True
        if self._known and found[1:] != self._known[1:]:
            return False
        begun, self._known = bool(self._known), found
        if not tensors:
            return True
        if begun and self.device.type != "cuda":  # no kernel is running that reads the old ones
            self._flat[: len(tensors)] = array.array("q", found[0])
            return True
        self._flat = array.array("q", itertools.chain.from_iterable(found))
        host = torch.frombuffer(self._flat, dtype=torch.int64)
        if self.device.type != "cuda":
            self.values = host
            return True
        # A pinned buffer is kept until its copy has run, by torch's caching host allocator.
        host = host.pin_memory()
        self.values = host.to(self.device, non_blocking=True)
        if torch.cuda.is_current_stream_capturing():
            self._replayed.append((host, self.values))  # a graph copies at every replay
        return True

    def tensors(self, part: int) -> list[torch.Tensor]:
        """The tensors of one part; of staged rows their copies."""
        found = [(self.staged[i][part] if i in self.staged else None, t) for i, t in enumerate(self.parts[part])]
        return [t if copy is None else copy for copy, t in found]

    def stage_in(self) -> None:
        """Before a kernel runs: bring the staged rows' values into their copies."""
        for i, copies in self.staged.items():
            for part, scratch in enumerate(copies):
                if scratch is not None:
                    scratch.copy_(self.parts[part][i])

    def stage_out(self, parts: Sequence[int]) -> None:
        """After a kernel ran: write the staged rows' values back from the parts it wrote."""
        for i, copies in self.staged.items():
            for part in parts:
                scratch = copies[part]
                if scratch is not None:
                    self.parts[part][i].copy_(scratch)


class PointerTable:
    """The rows of a table cut into chunks, with their addresses, as generated kernels read them.

    Attributes:
        chunks: how many pieces the rows are cut into.
        row, start, count: int64 tensors of shape [chunks]: the row, first element and length of each piece.
        first: int64, shape [rows + 1]: the first chunk of each row.
        memory: the addresses (``values``), and the rows that are staged.
    """

    def __init__(self, memory: AddressTable, chunk: int) -> None:
        self.memory = memory
        ends = list(itertools.accumulate((-(-length // chunk) for length in memory.lengths), initial=0))
        self.chunks = ends[-1]
        sizes, first = (torch.tensor(n, dtype=torch.int64, device="cpu") for n in (memory.lengths, ends))
        row = torch.repeat_interleave(first.diff(), output_size=self.chunks)
        start = (torch.arange(len(row), dtype=torch.int64, device="cpu") - first[row]) * chunk
        count = (sizes[row] - start).clamp(max=chunk)
        self.row, self.start, self.count, self.first = (t.to(memory.device) for t in (row, start, count, first))


class ScalarTable:
    """The numbers of a kernel, one line for each name and one entry for each row, kept on the device.

    Args:
        names: in the order in which the kernel reads them.
        rows: length of a line.
        dtype: float32 or float64.
        device: where the kernel runs.
    """

    def __init__(self, names: Sequence[str], rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self.values = torch.zeros(max(len(names), 1), rows, dtype=dtype, device=device)
        self._lines = [(i, name, line) for i, (name, line) in enumerate(zip(names, self.values.unbind(), strict=False))]
        self._last: dict[str, float] = {}
        self._host: Any = None  # the memory of the only row on a CPU: written faster than an op fills it
        if rows == 1 and device.type == "cpu":
            number = ctypes.c_double if dtype is torch.float64 else ctypes.c_float
            self._host = (number * len(self.values)).from_address(self.values.data_ptr())

    def fill(self, scalars: Scalars) -> torch.Tensor:
        """Write this step's numbers; those of the host only where they changed. Reads nothing back."""
        last = self._last
        for i, name, line in self._lines:
            value = scalars[name]
            if isinstance(value, torch.Tensor):
                (line.view(torch.int32) if value.dtype is torch.int32 else line).copy_(value, non_blocking=True)
                last.pop(name, None)
            elif last.get(name) == value:
                continue
            elif self._host is not None:
                self._host[i] = last[name] = value
            else:
                line.fill_(value)
                if self.values.is_cuda and torch.cuda.is_current_stream_capturing():
                    self._last.pop(name, None)  # it is filled at every replay, and was not now
                else:
                    self._last[name] = value
        return self.values


def _alike(row: Sequence[torch.Tensor]) -> bool:
    """Whether the tensors fill their memory without holes and in the same order."""
    if all(t.is_contiguous() for t in row):
        return True
    strides = row[0].stride()
    return all(t.stride() == strides for t in row) and _dense(row[0])


def _staging(
    row: Sequence[torch.Tensor], alike: Sequence[bool], codes: torch.Tensor | None
) -> list[torch.Tensor | None]:
    """Room for copies of a row that lie alike in memory."""
    if codes is None:
        return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in row]
    size, strides = codes.size(), codes.stride()
    return [
        torch.empty_strided(size, strides, dtype=t.dtype, device=t.device) if each else None
        for t, each in zip(row, alike, strict=True)
    ]


def _dense(tensor: torch.Tensor) -> bool:
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True
