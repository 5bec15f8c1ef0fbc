"""The ``torch`` backend, for a CPU without a C++ compiler: torch's own fused steps are the fastest thing there.

An update that torch has a call for (``ElementwiseKernel.by_torch``) runs on that; its numbers differ from those of the
other backends by roundings. Sums of squares are BLAS products. All of this goes piece by piece, so that the numbers of
a piece stay in the cache while they are widened, updated and rounded. What is left runs on ``torch._foreach``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..expr import ElementwiseKernel, trace
from ..storage import Storage, honoured, join, split
from ..tensor_table import Launcher, PointerTable, Scalars, TensorTable
from .foreach import ForeachLauncher

__all__ = ["SquaresLauncher", "UpdateLauncher", "launcher"]

_PIECE = 1 << 20  # elements: 20 MB in all columns of Adam together; smaller ones cost more in calls than caches save

Tensors = list[torch.Tensor]


def launcher(kernel: ElementwiseKernel, table: TensorTable) -> Launcher:
    """A kernel made ready for a table."""
    traced = trace(kernel)
    kinds = {table.columns[name][0].kind for name in traced.columns}
    if kernel.by_torch is not None and "stochastic" not in kinds:
        return UpdateLauncher(kernel, table)
    only_sums = len(traced.squares) == 1 and set(traced.checks) <= set(traced.squares) and not traced.stores
    if only_sums and traced.nodes[traced.squares[0]].op == "load" and kinds == {"dense"}:
        return SquaresLauncher(kernel, table)
    return ForeachLauncher(kernel, table)


class _Piece:
    """Some elements of one row or of several, about ``_PIECE`` of them, as flat tensors."""

    def __init__(self, rows: list[int], starts: list[int], counts: list[int]) -> None:
        self.rows = rows
        self.counts = counts
        self.size = sum(counts)
        self._places = list(zip(rows, starts, counts, strict=True))

    def of(self, tensors: Tensors) -> Tensors:
        """These elements in a tensor of each row, in the order in which they lie in memory."""
        return [
            (tensor := tensors[row]).as_strided((count,), (1,), tensor.storage_offset() + start)
            for row, start, count in self._places
        ]


def _pieces(pointers: PointerTable) -> Iterator[_Piece]:
    rows, starts, counts = pointers.row.tolist(), pointers.start.tolist(), pointers.count.tolist()
    first, size = 0, 0
    for i, count in enumerate(counts):
        if size and size + count > _PIECE:
            yield _Piece(rows[first:i], starts[first:i], counts[first:i])
            first, size = i, 0
        size += count
    if size:
        yield _Piece(rows[first:], starts[first:], counts[first:])


class _Room:
    """Memory for the elements of a piece, which all pieces use in turn."""

    def __init__(self) -> None:
        self._memory: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def copy(self, name: str, dtype: torch.dtype, piece: _Piece, source: Tensors) -> torch.Tensor:
        """The elements of a piece in one flat tensor. Zeros fill it up to a multiple of four."""
        whole = -(-piece.size // 4) * 4
        memory = self._memory.get((name, dtype))
        if memory is None or memory.numel() < whole:
            memory = self._memory[name, dtype] = torch.empty(max(whole, _PIECE), dtype=dtype)
        memory[piece.size : whole] = 0
        torch._foreach_copy_(list(memory[: piece.size].split(piece.counts)), source)
        return memory[:whole]


class UpdateLauncher(Launcher):
    """An update by torch's fused call. Where that does not have the numbers of a step, ``torch._foreach`` runs it."""

    def __init__(self, kernel: ElementwiseKernel, table: TensorTable) -> None:
        self._kernel, self._table = kernel, table
        self._foreach = ForeachLauncher(kernel, table)
        self._stores = frozenset(trace(kernel).stores)
        self._room = _Room()
        self._pointers = pointers = table.pointers(_PIECE)
        slots = table.slots
        self._columns = [(name, table.columns[name][0], slots[name]) for name in trace(kernel).columns]
        kept = [(slot + i, pointers.tensors(slot + i)) for _, s, slot in self._columns for i in range(len(s.dtypes))]
        self._pieces = [
            (piece, {part: piece.of(tensors) for part, tensors in kept if part}) for piece in _pieces(pointers)
        ]
        self._written = [
            slot + i for name, s, slot in self._columns if name in self._stores for i in range(len(s.dtypes))
        ]

    def __call__(
        self, scalars: Scalars, *, skip: torch.Tensor | None = None, found: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run it; see ``Launcher``."""
        assert self._kernel.by_torch is not None
        update = self._kernel.by_torch(scalars)
        if update is None:
            return self._foreach(scalars, skip=skip, found=found)
        if skip is None or not skip.item():
            self._pointers.stage_in()
            renewed = self._pointers.tensors(0)
            for piece, parts in self._pieces:
                places = {0: piece.of(renewed), **parts}
                columns = {}
                for name, storage, slot in self._columns:
                    columns[name] = self._load(
                        name, storage, [places[slot + i] for i in range(len(storage.dtypes))], piece
                    )
                update(columns, piece.rows)
                for name, storage, slot in self._columns:
                    if name in self._stores:
                        _store(storage, [places[slot + i] for i in range(len(storage.dtypes))], columns[name])
            self._pointers.stage_out(self._written)
        return torch.zeros(0, len(self._table), dtype=torch.float64)

    def _load(self, name: str, storage: Storage, parts: list[Tensors], piece: _Piece) -> Tensors:
        """The values of a column in the dtype of the arithmetic: where they lie if they are stored so, else copies."""
        room, dtype = self._room, self._table.compute_dtype
        if storage.kind == "split":
            weight, remainder = (room.copy(name, d, piece, part) for d, part in zip(storage.dtypes, parts, strict=True))
            return list(join(weight, remainder)[: piece.size].split(piece.counts))
        if storage.kind == "plain":
            kept, found = (room.copy(f"{name} {part}", storage.dtypes[1], piece, parts[part]) for part in (0, 1))
            if not torch.equal(kept.view(torch.int64), found.view(torch.int64)):
                for master, weight in zip(*parts, strict=True):
                    master.copy_(honoured(master, weight))
        if name in self._stores and storage.dtypes[0] is dtype:
            return parts[0]
        return list(room.copy(name, dtype, piece, parts[0])[: piece.size].split(piece.counts))


def _store(storage: Storage, parts: list[Tensors], values: Tensors) -> None:
    """Write values to the parts of a column that they do not lie in."""
    if storage.kind == "split":
        for value, weight, remainder in zip(values, *parts, strict=True):
            high, low = split(value)
            weight.copy_(high)
            remainder.copy_(low)
        return
    for part in parts:
        if part is not values:
            torch._foreach_copy_(part, values)


class SquaresLauncher(Launcher):
    """The sum of squares of one column, and whether it is finite."""

    def __init__(self, kernel: ElementwiseKernel, table: TensorTable) -> None:
        traced = trace(kernel)
        self._checks = bool(traced.checks)
        self._table, self._column = table, str(traced.nodes[traced.squares[0]].args[0])
        self._room = _Room()
        self._pointers = table.pointers(_PIECE)
        self._pieces = list(_pieces(self._pointers))

    def __call__(
        self, scalars: Scalars, *, skip: torch.Tensor | None = None, found: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run it; see ``Launcher``."""
        sums = torch.zeros(1, len(self._table), dtype=torch.float64)
        if not self._pieces or (skip is not None and skip.item()):
            return sums
        self._pointers.stage_in()
        tensors = self._pointers.tensors(self._table.slots[self._column])
        for piece in self._pieces:
            flat = self._room.copy(self._column, self._table.compute_dtype, piece, piece.of(tensors))
            values = flat[: piece.size].split(piece.counts)
            squares = torch.stack([torch.dot(value, value) for value in values]).double()
            # Where a float32 sum overflows or loses digits, float64 is taken. In range, every value is finite.
            for i in ((squares > 1e-20) & (squares < 1e30)).logical_not_().nonzero().flatten().tolist():
                wide = values[i].double()
                squares[i] = torch.dot(wide, wide)
                if found is not None and self._checks and not wide.isfinite().all():
                    found.fill_(1.0)
            sums[0].index_add_(0, torch.tensor(piece.rows), squares)
        return sums
