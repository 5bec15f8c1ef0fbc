"""Rows of tensors that a kernel processes in one call, with the pointers and chunks that generated kernels read.

A row is a parameter with its gradient and state. A column has one tensor per row, such as the gradients. ``launch``
runs a kernel on a table.
"""

from __future__ import annotations

import array
import ctypes
import itertools
from collections.abc import Mapping, Sequence
from operator import attrgetter, itemgetter
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
_NUMBERS = {float, int, bool}
_STRIDE, _ADDRESS = torch.Tensor.stride, torch.Tensor.data_ptr

Number = float | torch.Tensor

Scalars = Mapping[str, Number]
"""The scalar arguments of a kernel: each is a float or a tensor of one element for all rows, or a tensor of shape
[rows]."""


def of_rows(numbers: Number, rows: Sequence[int]) -> list[torch.Tensor]:
    """Return the scalar of each of the given rows as a 0-dim float32 tensor."""
    if not isinstance(numbers, torch.Tensor) or numbers.dim() == 0:
        return [torch.as_tensor(numbers, dtype=torch.float32, device=getattr(numbers, "device", "cpu"))] * len(rows)
    return list(numbers.float()[list(rows)].unbind())


Column = tuple[Storage, tuple[list[torch.Tensor], ...]]
"""The storage of a column's values, and a list of tensors per part of the storage."""


class Launcher(Protocol):
    """A kernel that one backend has prepared for a table."""

    def __call__(
        self, scalars: Scalars, *, skip: torch.Tensor | None = None, found: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run the kernel.

        Args:
            scalars: the scalars that the kernel names, and ``seed`` (int32, shape [rows]) for a stochastic column.
                Other names are ignored.
            skip: 0-dim float32 tensor on the table's device; if it is not 0, the kernel writes nothing.
            found: 0-dim float32 tensor on the table's device, set to 1.0 if a checked value is inf or NaN.

        Returns:
            A float64 tensor of shape [len(kernel.squares), rows]: the sums of squares that the kernel names.
        """


class TensorTable:
    """Columns of equal length on one device. It holds the local parts of sharded tensors.

    Args:
        columns: columns by name, with any mixture of plain and sharded tensors. ``renew`` replaces the tensors of the
            first column.
        compute_dtype: the dtype of the arithmetic. None chooses float64 if a column holds float64, else float32.

    Attributes:
        launchers: the kernels prepared for this table, by requested backend (None if none was requested) and kernel.
    """

    def __init__(self, columns: Mapping[str, Column], compute_dtype: torch.dtype | None = None) -> None:
        self._placements = placements_of(next(iter(columns.values()))[1][0])
        self.columns = {name: (storage, tuple(map(locals_of, parts))) for name, (storage, parts) in columns.items()}
        self._first = name, storage = next((name, storage) for name, (storage, _) in self.columns.items())
        first = self.columns[name][1][0]
        self._kinds = {(storage.dtypes[0], torch.strided)}
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
        """Build a table of columns that hold one dtype each."""
        return cls({name: (dense(tensors[0].dtype), (list(tensors),)) for name, tensors in columns.items()})

    def beside(self, columns: Mapping[str, list[torch.Tensor]]) -> TensorTable:
        """Build a table that has the columns of this table and further columns that hold one dtype each."""
        more = {name: (dense(tensors[0].dtype), (tensors,)) for name, tensors in columns.items()}
        return TensorTable({**self.columns, **more}, self.compute_dtype)

    def __len__(self) -> int:
        return self._length

    @property
    def slots(self) -> dict[str, range]:
        """The indices of each column's parts, as pointer tables count parts."""
        ends = itertools.accumulate(len(parts) for _, parts in self.columns.values())
        columns = zip(self.columns.items(), ends, strict=True)
        return {name: range(end - len(parts), end) for (name, (_, parts)), end in columns}

    def renew(self, tensors: list[torch.Tensor]) -> bool:
        """Put new tensors of the same kind into the first column, usually this step's gradients.

        A list of plain tensors is kept as it is. A step clears it in the end, so that ``zero_grad`` frees them.

        Returns:
            False if their dtype, layout or placement differs, or if the memory of another column was replaced. The
            caller must then build a new table.
        """
        if self._placements or not ORDINARY.issuperset(map(type, tensors)):
            if placements_of(tensors) != self._placements:
                return False
            tensors = locals_of(tensors)
        # A step runs this for every gradient, so the loops run in ``map``.
        if not {*map(_KIND, tensors)} <= self._kinds or list(map(_STRIDE, tensors)) != self._strides:
            return False
        name, storage = self._first
        self.columns[name] = (storage, (tensors,))
        return self._addresses is None or self._addresses.update(tensors)

    def pointers(self, chunk: int) -> PointerTable:
        """Return the pointers and chunks of this table, built once per chunk size; all sizes share the addresses."""
        if self._addresses is None:
            self._addresses = AddressTable(self)
        if chunk not in self._pointers:
            self._pointers[chunk] = PointerTable(self._addresses, chunk)
        return self._pointers[chunk]


class AddressTable:
    """The memory addresses of the tensors of a table.

    A row is staged if its tensors do not all lie in memory in the same dense order: kernels work on copies in one
    order, and the copies are written back after the kernel. The copies have the order of the row's 8-bit codes, whose
    blocks are runs in memory; without codes the copies are contiguous.

    Attributes:
        device: the device of the tensors.
        lengths: the element count of each row.
        parts: the tensors of each part of each column, one list per part. The first list is empty between steps.
        staged: the copies of the tensors of staged rows, by the indices of their part and row. Tensors without one
            element per value are used in place.
        values: int64, shape [parts * rows]: the addresses of the tensors of each part of each column, on the device.
    """

    def __init__(self, table: TensorTable) -> None:
        self.device = table.device
        self.parts = [list(part) for _, parts in table.columns.values() for part in parts]
        # For each part, True if it has one element per value.
        storages = [storage for storage, _ in table.columns.values()]
        alike = [place < each.elementwise for each in storages for place in range(len(each.dtypes))]
        self.staged = {
            (part, i): copy
            for i, row in enumerate(zip(*self.parts, strict=True))
            if not _alike(list(itertools.compress(row, alike)))
            for part, copy in _staging(row, alike).items()
        }
        self.lengths = [t.numel() for t in self.parts[0]]
        # All parts but the first, and their addresses.
        self._others = list(itertools.chain.from_iterable(self.parts[1:]))
        self._known = list(map(_ADDRESS, self._others))
        rows = len(self.lengths)
        self._flat = array.array("q", [0] * rows + self._known)  # on a CPU it is the memory of ``values``
        for (part, i), copy in self.staged.items():
            self._flat[part * rows + i] = copy.data_ptr()
        self._on_host = self.device.type != "cuda"
        self.values = torch.empty(0, dtype=torch.int64, device="cpu")
        if self._on_host and rows:
            self.values = torch.frombuffer(self._flat, dtype=torch.int64)
        self._replayed: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.update(next(iter(table.columns.values()))[1][0])  # the list that a step clears

    def update(self, tensors: list[torch.Tensor]) -> bool:
        """Use new tensors as the first column, and write their addresses if these changed.

        Returns:
            False if the memory of another column was replaced: its layout may also have changed.
        """
        self.parts[0] = tensors
        if list(map(_ADDRESS, self._others)) != self._known:
            return False
        found = array.array("q", map(_ADDRESS, tensors))
        for (part, i), copy in self.staged.items():
            if part == 0:
                found[i] = copy.data_ptr()
        if self._on_host:  # no running kernel reads the old addresses
            self._flat[: len(tensors)] = found
        elif tensors and not (len(self.values) and found == self._flat[: len(tensors)]):
            self._flat[: len(tensors)] = found
            # Torch's caching host allocator keeps a pinned buffer until its copy has run.
            host = torch.frombuffer(self._flat, dtype=torch.int64).pin_memory()
            self.values = host.to(self.device, non_blocking=True)
            if torch.cuda.is_current_stream_capturing():
                self._replayed.append((host, self.values))  # a graph copies at every replay
        return True

    def tensors(self, part: int) -> list[torch.Tensor]:
        """Return the tensors of one part, with the copies in place of staged tensors."""
        return [self.staged.get((part, i), t) for i, t in enumerate(self.parts[part])]

    def stage_in(self) -> None:
        """Copy the values of staged rows into their copies, before a kernel runs."""
        for (part, i), copy in self.staged.items():
            copy.copy_(self.parts[part][i])

    def stage_out(self, parts: Sequence[int]) -> None:
        """Copy the values of staged rows back from the parts that a kernel wrote."""
        for (part, i), copy in self.staged.items():
            if part in parts:
                self.parts[part][i].copy_(copy)


class PointerTable:
    """The rows of a table cut into chunks, with their addresses, as generated kernels read them.

    Attributes:
        chunks: the total count of chunks.
        row, start, count: int64 tensors of shape [chunks]: the row, first element and length of each chunk.
        first: int64, shape [rows + 1]: the first chunk of each row.
        memory: the addresses (``values``) and the staged rows.
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
    """The scalars of a kernel on its device, one line per name and one entry per row.

    Args:
        names: the scalars' names in the order in which the kernel reads them.
        rows: the length of a line.
        dtype: float32 or float64.
        device: the device of the kernel.
    """

    def __init__(self, names: Sequence[str], rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self.values = torch.zeros(max(len(names), 1), rows, dtype=dtype, device=device)
        self._lines = list(zip(names, self.values.unbind(), strict=False))
        self._last: dict[str, float] = {}
        self._host: Any = None  # the memory of the only row on a CPU: written faster than an op fills it
        if rows == 1 and len(names) > 1 and device.type == "cpu":
            number = ctypes.c_double if dtype is torch.float64 else ctypes.c_float
            self._host, self._numbers = (number * len(names)).from_address(self.values.data_ptr()), itemgetter(*names)

    def fill(self, scalars: Scalars) -> torch.Tensor:
        """Write this step's scalars, numbers of the host only if they changed. Reads nothing from the device."""
        last = self._last
        if self._host is not None and _NUMBERS.issuperset(map(type, numbers := self._numbers(scalars))):
            self._host[:] = numbers
            last.clear()
            return self.values
        for name, line in self._lines:
            value = scalars[name]
            if isinstance(value, torch.Tensor):
                (line.view(torch.int32) if value.dtype is torch.int32 else line).copy_(value, non_blocking=True)
                last.pop(name, None)
            elif last.get(name) != value:
                line.fill_(value)
                if self.values.is_cuda and torch.cuda.is_current_stream_capturing():
                    self._last.pop(name, None)  # capturing did not fill the line; each replay will
                else:
                    self._last[name] = value
        return self.values


def _alike(row: Sequence[torch.Tensor]) -> bool:
    """True if the tensors fill their memory without holes and in the same order."""
    if all(t.is_contiguous() for t in row):
        return True
    strides = row[0].stride()
    return all(t.stride() == strides for t in row) and _dense(row[0])


def _staging(row: Sequence[torch.Tensor], alike: Sequence[bool]) -> dict[int, torch.Tensor]:
    """Allocate copies, by part, of a row's tensors in one order of memory: the order of its codes, or contiguous."""
    contiguous = torch.empty(row[0].shape, dtype=torch.uint8, device="meta")
    order = next((t for t in row if t.dtype is torch.uint8), contiguous)
    return {
        part: torch.empty_strided(order.size(), order.stride(), dtype=row[part].dtype, device=row[part].device)
        for part in itertools.compress(range(len(row)), alike)
    }


def _dense(tensor: torch.Tensor) -> bool:
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True
