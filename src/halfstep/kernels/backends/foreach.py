"""The ``eager`` backend, the reference: runs a kernel on lists of tensors by ``torch._foreach``, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...core.scalars import in_scalar_dtype, scalar_dtype
from ..blockwise import dequantize, quantize
from ..expr import ElementwiseKernel, Expression, trace
from ..storage import Storage, after_writes, join, round_stochastic, split
from ..tensor_table import Launcher, Number, Scalars, TensorTable

__all__ = ["ForeachLauncher", "Lanes", "PerRow", "numbers_of", "store"]

_Numbers = float | list[float] | list[torch.Tensor]


class ForeachLauncher(Launcher):
    """One kernel over one table.

    Every operation is rounded, as in the other backends. On a CPU ``skip`` is read, which is free there. On other
    devices the old values are selected without a read.
    """

    def __init__(self, kernel: ElementwiseKernel, table: TensorTable) -> None:
        self._kernel = kernel
        self._trace = trace(kernel)
        self._table = table

    def __call__(
        self, scalars: Scalars, *, skip: torch.Tensor | None = None, found: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run the kernel; see ``Launcher``."""
        table, traced, kernel = self._table, self._trace, self._kernel
        results = torch.zeros(len(kernel.squares), len(table), dtype=scalar_dtype(table.device), device=table.device)
        on_cpu = table.device.type == "cpu"
        if len(table) == 0 or (on_cpu and skip is not None and skip.item()):
            return results
        loaded = {name: _load(table, name) for name in traced.loads}
        # A column that is only written is an argument as well: None, because the function must not read it.
        columns = [Lanes(loaded[name]) if name in loaded else None for name in traced.columns]
        numbers = {name: PerRow(numbers_of(scalars[name], table)) for name in traced.scalars}
        outputs = kernel.fn(*columns, **numbers)
        for i, name in enumerate(kernel.squares):
            results[i] = _norms(outputs[name].tensors).square()
        for name in kernel.checks:
            filled = [t for t in outputs[name].tensors if t.numel()]
            if found is not None and filled:
                largest = torch.stack(torch._foreach_norm(filled, torch.inf))
                found.copy_(torch.maximum(found, (~largest.isfinite()).any().to(found)))
        for name in traced.stores:
            values = outputs[name].tensors
            if table.columns[name][0].kind == "blockwise":
                _store_codes(table, name, values, None if on_cpu else skip)
                continue
            if skip is not None and not on_cpu:
                old = loaded[name] if name in loaded else _load(table, name)
                values = [torch.where(skip != 0, o, v) for o, v in zip(old, values, strict=True)]
            _store(table, name, values, scalars)
        return results


class Lanes(Expression):
    """A list of tensors that acts as one value in an expression."""

    __slots__ = ("tensors",)

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors

    def _apply(self, op: str, *operands: Lanes | PerRow | float) -> Lanes:
        given = [x.tensors if isinstance(x, Lanes) else x.numbers if isinstance(x, PerRow) else x for x in operands]
        return Lanes(list(getattr(torch, f"_foreach_{op}")(*given)))

    # torch._foreach takes numbers as the second operand only.
    __radd__ = Expression.__add__
    __rmul__ = Expression.__mul__


class PerRow:
    """A number for each row, on the right or the left of an operator with ``Lanes``."""

    __slots__ = ("numbers",)

    def __init__(self, numbers: _Numbers) -> None:
        self.numbers = numbers


def numbers_of(value: Number, table: TensorTable) -> _Numbers:
    """Round numbers to the table's compute dtype, in a form that ``_foreach`` accepts, without a read from CUDA."""
    if not isinstance(value, torch.Tensor):
        return float(value)
    value = value.to(table.device, table.compute_dtype, non_blocking=True)
    if table.device.type == "cpu":
        return float(value) if value.numel() == 1 else value.tolist()
    return list(value.expand(len(table)).unbind())


def _load(table: TensorTable, name: str) -> list[torch.Tensor]:
    storage, parts = table.columns[name]
    if storage.kind == "split":
        return [join(weight, remainder) for weight, remainder in zip(*parts, strict=True)]
    if storage.kind == "blockwise":
        coded = zip(*parts[:2], strict=True)
        return [dequantize(codes, absmax, storage).to(table.compute_dtype) for codes, absmax in coded]
    source = parts[0]
    if storage.kind == "plain":
        source = [after_writes(master, weight) for master, weight in zip(*parts, strict=True)]
    if storage.dtypes[0] == table.compute_dtype:
        return source
    wide = [torch.empty_like(t, dtype=table.compute_dtype) for t in source]
    torch._foreach_copy_(wide, source)
    return wide


def _store(table: TensorTable, name: str, values: list[torch.Tensor], scalars: Scalars) -> None:
    storage, parts = table.columns[name]
    if storage.kind != "stochastic":
        store(storage, parts, values)
        return
    seeds = scalars["seed"]
    assert isinstance(seeds, torch.Tensor)
    for value, weight, seed in zip(values, parts[0], seeds.to(table.device).unbind(), strict=True):
        # Elements are numbered in the order of the weight's memory, or in C order if it has holes.
        laid = torch.empty_like(weight, dtype=torch.float32).copy_(value)
        weight.copy_(round_stochastic(laid, seed))


def store(storage: Storage, parts: Sequence[list[torch.Tensor]], values: list[torch.Tensor]) -> None:
    """Write values to the parts of a column; the values may be its first part."""
    if storage.kind == "split":
        for value, weight, remainder in zip(values, *parts, strict=True):
            high, low = split(value)
            weight.copy_(high)
            remainder.copy_(low)
        return
    first, *others = parts
    if first is not values:
        torch._foreach_copy_(first, values)
    for part in others:  # a weight is the rounded master, not a float64 value rounded once
        torch._foreach_copy_(part, first)


def _store_codes(table: TensorTable, name: str, values: list[torch.Tensor], skip: torch.Tensor | None) -> None:
    """Write values as 8-bit codes. If ``skip`` is not 0, write the old codes, without another rounding."""
    storage, parts = table.columns[name]
    for value, *old in zip(values, *parts[:2], strict=True):
        laid = torch.empty_like(old[0], dtype=torch.float32).copy_(value)
        for kept, new in zip(old, quantize(laid, storage), strict=True):
            kept.copy_(new if skip is None else torch.where(skip != 0, kept, new))


def _norms(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Compute the 2-norm of each tensor; on a CPU in float64, because float32 sums lose digits and overflow."""
    dtype = scalar_dtype(tensors[0].device) if tensors[0].device.type == "cpu" else None
    norms: list[Any] = list(torch._foreach_norm(tensors, 2, dtype=dtype))
    return in_scalar_dtype(torch.stack(norms))
