"""A record of one step: a sample of the result of each op, and the ops from which its inputs came."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ...casting.scope import active_casting
from ...core.oplists.names import spellings
from ...core.oplists.tables import row_of, words
from ..observe.names import OUTSIDE, canonical
from ..observe.ops import OpCall, tensors_in
from ..observe.reading import Reading
from ..observe.samples import can_sample, sample
from .linked_rows import LinkedRow

__all__ = ["Recorder"]

_PASS_ON = frozenset(("_to_copy", "copy_", "lift_fresh", "detach"))
"""Ops that only move values, possibly to another dtype. A run in one dtype lacks some of them."""

_MAKE = words("""
    _unsafe_view arange empty empty_like empty_strided full full_like lift_fresh new_empty new_empty_strided new_full
    new_ones new_zeros ones ones_like scalar_tensor zeros zeros_like
    """)
"""Ops whose results do not depend on an input."""

_SUMMED = 128
"""The number of sums in a sketch, which gives the norm of a difference to about a tenth."""

_SUMS = frozenset(("add", "add_"))
"""Ops by which autograd sums gradients in a backward pass, in an order that depends on the casts."""


class Recorder:
    """Records the ops of one run.

    Args:
        samples: the number of values to keep of each tensor.
        dtype: the dtype of the kept values.
    """

    def __init__(self, samples: int, dtype: torch.dtype = torch.float32) -> None:
        self.rows: list[LinkedRow] = []
        self._samples = samples
        self._dtype = dtype
        self._made: dict[int, int] = {}
        self._signs: dict[torch.device, torch.Tensor] = {}
        self._pauses = False

    def begin(self, names: dict[nn.Module, str]) -> None:
        """Record the parameters and buffers at the start of a run."""
        for module, name in names.items():
            for own, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
                if self._has_row(tensor) and _place(tensor) not in self._made:
                    self._write(self._row(tensor, name, own), tensor)

    def begin_backward(self, root: torch.Tensor) -> None:
        """Record the gradient of the loss, which is the loss scale."""
        self._pauses = True
        row = self._row(root, OUTSIDE, "loss scale", backward=True, passes_on=True, scaled=True)
        self._pauses = False
        self._write(row, root)

    def notice(self, call: OpCall) -> None:
        """Record the result of an op, unless it is a view."""
        name = call.name
        if self._pauses:
            return
        if call.op.is_view or name in _MAKE:
            if name in _MAKE and name != "_unsafe_view":  # perhaps in memory that another tensor had before
                self._made.pop(_place(call.result), None)
            return
        wide = not call.backward and _should_be_wide(name, call.function)
        inputs = tuple(dict.fromkeys(self._came_from(call.module, call.args, call.kwargs, filled=call.result)))
        results = tensors_in(call.result if call.result is not None else call.args[:1])
        for index, tensor in enumerate(filter(self._has_row, results)):
            row = self._row(tensor, call.module, name, index, call.backward, inputs=inputs, wide=wide)
            row.passes_on = name in _PASS_ON or (call.backward and name in _SUMS)
            row.emulates = call.emulates
            row.scaled = any(self.rows[i].scaled for i in inputs)
            if name == "add" and row.passes_on:
                terms = [term for term in call.args[:2] if term.shape == tensor.shape]
                row.source = self._sample(terms[0]) + self._sample(terms[1]) if len(terms) == 2 else None
            elif row.passes_on and name != "add_":
                row.cast = call.cast
                if row.cast is not None and call.source.shape == tensor.shape:
                    row.source = self._sample(call.source)
                product = self.rows[inputs[0]] if inputs and row.cast is not None else row
                if product.emulates is row.dtype:  # the cast that rounds an emulated product is part of the product
                    product.dtype, product.sample = row.dtype, row.sample
                    product.amax, product.sketch = row.amax, row.sketch
                    self._made[_place(tensor)] = inputs[0]
                    continue
            self._write(row, tensor)

    def end(self, model: nn.Module) -> None:
        """Mark the gradients of parameters, and fetch the recorded samples."""
        for param in model.parameters():
            at = None if param.grad is None or not can_sample(param.grad) else self._made.get(_place(param.grad))
            while at is not None and self.rows[at].backward and not self.rows[at].leaf:
                self.rows[at].leaf = True
                at = self.rows[at].inputs[0] if self.rows[at].passes_on and self.rows[at].inputs else None
        self._fetch()

    def _fetch(self) -> None:
        """Copy all samples to the host."""
        places = [(row, name) for row in self.rows for name in ("sample", "amax", "sketch", "source")]
        places = [(row, name) for row, name in places if getattr(row, name) is not None]
        read = Reading(*(getattr(row, name) for row, name in places)).send()
        for (row, name), value in zip(places, read.get(), strict=True):
            setattr(row, name, float(value) if name == "amax" else value)

    def _row(
        self, tensor: torch.Tensor, module: str, op: str, index: int = 0, backward: bool = False, **known: Any
    ) -> LinkedRow:
        """Make the row of a tensor; ``known`` are more of its attributes."""
        return LinkedRow(module, op, index, backward, tensor.dtype, tensor.shape, *self._look(tensor), **known)

    def _look(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute the sample, the largest magnitude and the sketch of a tensor."""
        values = tensor.detach()
        amax = torch.stack(torch.aminmax(values)).abs().amax().to(self._dtype)
        return self._sample(values), amax, self._sketch(values)

    def _sample(self, values: torch.Tensor) -> torch.Tensor:
        return sample(values.detach(), self._samples).to(self._dtype, copy=True)

    def _sketch(self, values: torch.Tensor) -> torch.Tensor:
        if values.numel() <= self._samples:
            return torch.empty(0, dtype=self._dtype, device=values.device)
        flat = values.reshape(-1).to(self._dtype)
        rows = flat.numel() // _SUMMED
        signs = self._signs.get(values.device)
        if signs is None or len(signs) < rows:
            bits = torch.randint(2, (2 * rows,), generator=torch.Generator().manual_seed(0), device="cpu")
            signs = self._signs[values.device] = (2 * bits - 1).to(values.device, self._dtype)
        return torch.cat([flat.norm().reshape(1), signs[:rows] @ flat[: rows * _SUMMED].view(rows, _SUMMED)])

    def _has_row(self, tensor: torch.Tensor) -> bool:
        """True if a tensor gets a row of the record."""
        return tensor.is_floating_point() and tensor.numel() > 0 and can_sample(tensor)

    def _write(self, row: LinkedRow, tensor: torch.Tensor) -> None:
        self._made[_place(tensor)] = len(self.rows)
        self.rows.append(row)

    def _came_from(self, module: str, *values: Any, filled: Any = None) -> Iterator[int]:
        for tensor in filter(self._has_row, tensors_in(values)):
            if _place(tensor) not in self._made:
                if not tensor.dim() or tensor is filled:  # a constant, or memory that the op wrote to
                    continue
                self._write(self._row(tensor, module, "input", passes_on=True), tensor)
            yield self._made[_place(tensor)]


def _should_be_wide(op: str, running: Callable[..., Any] | None) -> bool:
    """True if an op should compute in fp32: by the op lists in force or, without lists, because it is a loss.

    Args:
        op: the name of the ATen op.
        running: the function that calls the op, which decides the rule: a pooling function may call ``mean``.
    """
    name = spellings().get(running, ("", False))[0] if running is not None else ""
    name, casting = name or canonical(op), active_casting()
    return row_of(name).reason == "loss" if casting is None else casting.lists.rule_of(name) in ("float", "banned")


def _place(tensor: torch.Tensor) -> int:
    """Return the start address of a tensor's storage, which all its views share."""
    return tensor.untyped_storage().data_ptr()
