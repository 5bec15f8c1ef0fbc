"""The rows of a compared run: each is linked to the rows from which its tensor was computed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import torch

from ...formats.products import RoundedTo
from ..observe.ops import Cast
from ..observe.row import Row

__all__ = ["LinkedRow", "aligned_rows"]

_Place = tuple[Hashable, Hashable] | None


@dataclass
class LinkedRow:
    """One tensor of a run: a parameter, a buffer, an input, the result of an op, or a row of a saved run.

    Attributes:
        module: the qualified name of the module that computed the tensor.
        op: the name of the op, parameter or buffer; in a saved run the role of the tensor in the module.
        index: the index among the op's results; in a saved run the index of the module's call.
        backward: True if the tensor belongs to a backward pass.
        dtype: the dtype in which it was computed.
        shape: the shape of the tensor.
        sample: a sample of its values, on the host in the end; empty if a saved run has none.
        amax: the largest magnitude of all values; inf or NaN if one is.
        sketch: the L2 norm of all values, and sums of all values with fixed random signs. The norm of the difference of
            two sketches approximates the norm of the tensors' difference. Empty if the sample has all values.
        inputs: the indices of the rows from which the tensor was computed.
        passes_on: True if the op only moves values or sums gradients.
        cast: the cast that the op makes; None for any other op.
        source: for a cast or a sum, the same sample of its input.
        leaf: True for a parameter or a final gradient, which are measured relative to all parameters of their module.
        wide: True if the op should compute in fp32.
        emulates: see ``OpCall``. The row has the result after rounding.
        scaled: True if the values include the loss scale of the run.
        saved: the row of a saved run. Its only input then represents all outputs and gradients before it.
    """

    module: str
    op: str
    index: int
    backward: bool
    dtype: torch.dtype
    shape: torch.Size
    sample: torch.Tensor
    amax: Any
    sketch: torch.Tensor
    inputs: tuple[int, ...] = ()
    passes_on: bool = False
    cast: Cast | None = None
    source: torch.Tensor | None = None
    leaf: bool = False
    wide: bool = False
    emulates: torch.dtype | RoundedTo | None = None
    scaled: bool = False
    saved: Row | None = None

    @property
    def place(self) -> _Place:
        """The position of the row in its run: its group and its key in the group. Rows with None are never aligned.

        A run in one dtype lacks the ops that only move values.
        """
        if self.saved is not None:
            return (self.saved.step, self.saved.module, self.saved.tensor), self.saved.call
        return None if self.passes_on else ((self.module, self.backward), (self.op, self.index, self.shape))


def aligned_rows(a: Sequence[LinkedRow], b: Sequence[LinkedRow]) -> tuple[dict[int, int], int]:
    """Align the rows of two runs; returns the matches and the number of unmatched rows.

    Rows of a group (a module and pass, or a tensor of a saved step) are aligned in order.
    """
    groups_a, groups_b = _groups(a), _groups(b)
    matched: dict[int, int] = {}
    for group in groups_a.keys() & groups_b.keys():
        (at_a, keys_a), (at_b, keys_b) = (zip(*of[group], strict=True) for of in (groups_a, groups_b))
        matched |= {at_a[i]: at_b[j] for i, j in _aligned(keys_a, keys_b)}
    return matched, sum(row.place is not None for rows in (a, b) for row in rows) - 2 * len(matched)


def _groups(rows: Iterable[LinkedRow]) -> dict[Hashable, list[tuple[int, Hashable]]]:
    found: dict[Hashable, list[tuple[int, Hashable]]] = defaultdict(list)
    for i, row in enumerate(rows):
        if (place := row.place) is not None:
            found[place[0]].append((i, place[1]))
    return found


def _aligned(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Align two sequences; returns pairs of indices."""
    blocks = [(0, 0, len(a))] if a == b else SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()
    return [(at_a + i, at_b + i) for at_a, at_b, size in blocks for i in range(size)]
