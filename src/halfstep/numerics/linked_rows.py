"""The rows of a run that is compared with another one: each knows which rows its tensor was made of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import torch

from ..observe.ops import Cast
from ..observe.row import Row

__all__ = ["LinkedRow", "aligned_rows"]

_Place = tuple[Hashable, Hashable] | None


@dataclass
class LinkedRow:
    """One tensor of a run: a parameter, a buffer, an input, what an op has returned, or a row of a saved run.

    Attributes:
        module: the qualified name of the module that has made it.
        op: the name of the op; for a parameter or buffer its own; in a saved run what it is to the module.
        index: which of the tensors that the op returned; in a saved run which call of the module.
        backward: whether it belongs to a backward pass.
        dtype: in which it was computed.
        shape: of the tensor.
        sample: some of its values, on the host in the end; empty where a saved run has none.
        amax: the largest magnitude of all values; inf or NaN if one is.
        sketch: the L2 norm of all values, and sums of all of them with fixed random signs. The norm of the difference
            of two such columns is, nearly, that of the difference of the tensors. Empty if the sample is all there is.
        inputs: the places in the list of rows of what it was made of.
        passes_on: whether the op computes nothing, or adds up gradients.
        cast: the cast that it is; None for any other op.
        source: if it is a cast or a sum, the same sample of what went in.
        leaf: whether it ends as a parameter or its gradient, to be measured against those of the same module.
        wide: whether the op should compute in fp32.
        scaled: whether the loss scale of the run is in it.
        saved: in a saved run its row. Then its one input stands for all outputs and gradients before it.
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
    scaled: bool = False
    saved: Row | None = None

    @property
    def place(self) -> _Place:
        """Where it stands in its run: its group, and which one of this it is. None is never aligned.

        A run in one dtype has no ops that only hand on values.
        """
        if self.saved is not None:
            return (self.saved.step, self.saved.module, self.saved.tensor), self.saved.call
        return None if self.passes_on else ((self.module, self.backward), (self.op, self.index, self.shape))


def aligned_rows(a: Sequence[LinkedRow], b: Sequence[LinkedRow]) -> tuple[dict[int, int], int]:
    """Which rows of a run belong to which rows of another, and how many rows only one of them has.

    Rows of a group, that is of a module and pass, or of a tensor of a saved step, are aligned in their order.
    """
    groups_a, groups_b = _groups(a), _groups(b)
    matched: dict[int, int] = {}
    for group in groups_a.keys() & groups_b.keys():
        (at_a, keys_a), (at_b, keys_b) = (zip(*of[group], strict=True) for of in (groups_a, groups_b))
        matched |= {at_a[i]: at_b[j] for i, j in _aligned(keys_a, keys_b)}
    total = sum(row.place is not None for rows in (a, b) for row in rows)
    return matched, total - 2 * len(matched)


def _groups(rows: Iterable[LinkedRow]) -> dict[Hashable, list[tuple[int, Hashable]]]:
    found: dict[Hashable, list[tuple[int, Hashable]]] = defaultdict(list)
    for i, row in enumerate(rows):
        if (place := row.place) is not None:
            found[place[0]].append((i, place[1]))
    return found


def _aligned(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Which places in two sequences belong together."""
    whole = [(0, 0, len(a))]
    blocks = whole if a == b else SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()
    return [(at_a + i, at_b + i) for at_a, at_b, size in blocks for i in range(size)]
