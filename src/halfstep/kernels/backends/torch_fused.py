"""The ``torch`` backend, for a CPU without a C++ compiler, where torch's fused steps are fastest.

An update for which torch has a call (``ElementwiseKernel.by_torch``) runs on this call; its numbers differ from the
other backends' by roundings. All other kernels run on ``torch._foreach``. Both run piece by piece, so that the numbers
of a piece stay in the cache while they are widened, updated and rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..expr import ElementwiseKernel, trace
from ..storage import after_writes, join
from ..tensor_table import Launcher, PointerTable, Scalars, TensorTable
from .foreach import ForeachLauncher, Lanes, PerRow, numbers_of, store

__all__ = ["PieceLauncher", "launcher"]

_PIECE = 1 << 21  # elements: 40 MB in all columns of Adam together; smaller pieces cost more in calls than caches save

Tensors = list[torch.Tensor]


def launcher(kernel: ElementwiseKernel, table: TensorTable) -> Launcher:
    """Prepare a kernel for a table; without pieces for stochastic rounding and blocks, which number whole tensors."""
    whole = any(storage.kind in ("stochastic", "blockwise") for storage, _ in table.columns.values())
    return ForeachLauncher(kernel, table) if whole else PieceLauncher(kernel, table)


class _Piece:
    """About ``_PIECE`` elements of one or several rows, as flat tensors."""

    def __init__(self, places: list[tuple[int, int, int]]) -> None:
        self._places = places
        self.rows, _, self.counts = map(list, zip(*places, strict=True))
        self.size = sum(self.counts)
        self.index = torch.tensor(self.rows, dtype=torch.int64, device="cpu")

    def of(self, tensors: Tensors) -> Tensors:
        """Select these elements from a tensor per row, in the order of memory."""
        return [
            (tensor := tensors[row]).as_strided((count,), (1,), tensor.storage_offset() + start)
            for row, start, count in self._places
        ]


def _pieces(pointers: PointerTable) -> list[_Piece]:
    pieces: list[list[tuple[int, int, int]]] = []
    size = 0
    for row, start, count in zip(pointers.row.tolist(), pointers.start.tolist(), pointers.count.tolist(), strict=True):
        if not pieces or size + count > _PIECE:
            pieces.append([])
            size = 0
        pieces[-1].append((row, start, count))
        size += count
    return list(map(_Piece, pieces))


class _Room:
    """Memory for the elements of a piece, shared by all pieces in turn."""

    def __init__(self) -> None:
        self._memory: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def copy(self, name: str, dtype: torch.dtype, piece: _Piece, source: Tensors) -> torch.Tensor:
        """Copy the elements of a piece to one flat tensor, padded with zeros to a multiple of four."""
        whole = -(-piece.size // 4) * 4
        memory = self._memory.get((name, dtype))
        if memory is None or memory.numel() < whole:
            memory = self._memory[name, dtype] = torch.empty(whole, dtype=dtype, device="cpu")
        memory[piece.size : whole] = 0
        torch._foreach_copy_(list(memory[: piece.size].split(piece.counts)), source)
        return memory[:whole]


class PieceLauncher(Launcher):
    """One kernel over one table, piece by piece."""

    def __init__(self, kernel: ElementwiseKernel, table: TensorTable) -> None:
        self._kernel, self._table, self._trace = kernel, table, trace(kernel)
        self._room = _Room()
        self._pointers = pointers = table.pointers(_PIECE)
        self._slots = {name: table.slots[name] for name in self._trace.columns}
        self._written = [part for name in self._trace.stores for part in self._slots[name]]
        kept = {part: pointers.memory.tensors(part) for parts in self._slots.values() for part in parts if part}
        self._pieces = [
            (piece, {part: piece.of(tensors) for part, tensors in kept.items()}) for piece in _pieces(pointers)
        ]

    def __call__(
        self, scalars: Scalars, *, skip: torch.Tensor | None = None, found: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run it; see ``Launcher``."""
        kernel, traced, table = self._kernel, self._trace, self._table
        results = torch.zeros(len(kernel.squares), len(table), dtype=torch.float64, device="cpu")
        if not self._pieces or (skip is not None and skip.item()):
            return results
        update = kernel.by_torch(scalars) if kernel.by_torch is not None else None
        numbers = {} if update is not None else {name: numbers_of(scalars[name], table) for name in traced.scalars}
        self._pointers.memory.stage_in()
        renewed = self._pointers.memory.tensors(0)
        for piece, kept in self._pieces:
            lists = {0: piece.of(renewed), **kept}
            parts = {name: [lists[part] for part in slots] for name, slots in self._slots.items()}
            columns = {name: self._load(name, parts[name], piece, copy=update is not None) for name in traced.loads}
            if update is not None:
                if scalars["factor"] != 1.0:
                    torch._foreach_mul_(columns["grad"], float(scalars["factor"]))
                update(columns, piece.rows)
                values: Mapping[str, Tensors] = columns
            else:
                lanes = [Lanes(columns[name]) if name in columns else None for name in traced.columns]
                per_row = {name: PerRow(_of_rows(number, piece.rows)) for name, number in numbers.items()}
                values = {name: output.tensors for name, output in kernel.fn(*lanes, **per_row).items()}
            suspects = {name: values[name] for name in kernel.checks}
            for i, name in enumerate(kernel.squares):
                squares, odd = _squares(values[name])
                results[i].index_add_(0, piece.index, squares)
                suspects[name] = odd if name in suspects else []
            if found is not None and not all(t.isfinite().all() for tensors in suspects.values() for t in tensors):
                found.fill_(1.0)
            for name in traced.stores:
                store(table.columns[name][0], parts[name], values[name])
        self._pointers.memory.stage_out(self._written)
        return results

    def _load(self, name: str, parts: list[Tensors], piece: _Piece, *, copy: bool) -> Tensors:
        """Load the values of a column in the compute dtype.

        Values that are stored in this dtype are not copied, unless ``copy`` is given for a column that is not stored.
        """
        room, dtype, storage = self._room, self._table.compute_dtype, self._table.columns[name][0]
        if storage.kind == "split":
            weight, remainder = (room.copy(name, d, piece, part) for d, part in zip(storage.dtypes, parts, strict=True))
            return list(join(weight, remainder)[: piece.size].split(piece.counts))
        stored = name in self._trace.stores
        values = parts[0]
        if storage.dtypes[0] is not dtype or (not stored and (copy or storage.kind == "plain")):
            values = list(room.copy(name, dtype, piece, values)[: piece.size].split(piece.counts))
        if storage.kind == "plain":
            kept, found = (room.copy(f"{name} {part}", storage.dtypes[1], piece, parts[part]) for part in (0, 1))
            if not torch.equal(kept.view(torch.int64), found.view(torch.int64)):
                for value, master, weight in zip(values, *parts, strict=True):
                    value.copy_(after_writes(master, weight))
        return values


def _squares(values: Tensors) -> tuple[torch.Tensor, Tensors]:
    """Sum the squares of each tensor; also returns the tensors that may hold inf or NaN.

    If a float32 sum overflows or loses digits, the sum is repeated in float64. A sum in range proves all values finite.
    """
    squares = torch.stack([torch.dot(value, value) for value in values]).double()
    odd = ((squares > 1e-20) & (squares < 1e30)).logical_not_().nonzero().flatten().tolist()
    for i in odd:
        wide = values[i].double()
        squares[i] = torch.dot(wide, wide)
    return squares, [values[i] for i in odd]


def _of_rows(numbers: Any, rows: list[int]) -> Any:
    return [numbers[row] for row in rows] if isinstance(numbers, list) else numbers
