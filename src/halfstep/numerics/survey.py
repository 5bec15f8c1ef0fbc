"""What the tensors of one step look like, computed where they lie and read once the device has got that far.

Of each tensor the largest magnitude is found in all of it. The rest is counted in a sample: every n-th element, as they
lie in memory. Exponents are taken from the bits of a float, which is 20 times faster than a logarithm.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch

from ..kernels.shards import local
from .row import PROBE, Row

__all__ = ["About", "Fetched", "LossScale", "Survey", "Surveyed", "can_survey", "spread"]

_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
_ZERO, _NAN, _INF, _KINDS = 256, 257, 255, 258
"""Of each number one of 258 kinds is counted: the 8 bits of its exponent, of which 255 is inf, or zero, or NaN."""

_BIAS = 127


LossScale = Literal["none", "in", "out"]
"""Whether numbers never met the loss scale, are multiplied by it, or were and are no longer."""


class About(NamedTuple):
    """Which tensor a row is about; see ``Row``."""

    step: int
    module: str
    tensor: str
    call: int = 0


class _Taken(NamedTuple):
    about: About
    dtype: torch.dtype
    numel: int
    extremes: tuple[torch.Tensor, ...]
    sample: torch.Tensor
    scale: LossScale


def can_survey(tensor: Any) -> bool:
    """Whether it is a tensor whose numbers can be looked at: real, dense, of 16 bits or more, and not empty."""
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.dtype in _DTYPES
        and tensor.layout is torch.strided
        and tensor.numel() > 0
        and tensor.device.type != "meta"
    )


def spread(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """At most ``count`` elements at even distances, in the order of memory; a copy.

    The distance is odd, so that the elements are not all of one column of a matrix.
    """
    tensor = local(tensor.detach())
    size = tensor.numel()
    if not tensor.is_contiguous():
        tensor = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    flat = tensor.reshape(-1)  # a view, unless memory has holes
    return flat[:: 1 if size <= count else -(-size // count) | 1].clone()


class Survey:
    """The tensors of one step.

    Args:
        count: how many elements of each to sample.
        bins: whether rows get histograms.
    """

    def __init__(self, count: int, *, bins: bool) -> None:
        self._count = max(count, PROBE)
        self._bins = bins
        self._taken: list[_Taken] = []

    def __len__(self) -> int:
        return len(self._taken)

    @torch.no_grad()
    def add(
        self, about: About, tensor: torch.Tensor, *, dtype: torch.dtype | None = None, scale: LossScale = "none"
    ) -> None:
        """Look at a tensor now, at the part of it that lies here: it may change or be freed afterwards.

        Args:
            about: which one it is.
            tensor: ``can_survey`` it.
            dtype: in which the numbers were computed, if not in that of the tensor.
            scale: what the loss scale has to do with it.
        """
        here = local(tensor.detach())
        if here.numel():
            values = spread(here, self._count)
            self._taken.append(_Taken(about, dtype or tensor.dtype, here.numel(), here.aminmax(), values, scale))

    def add_values(
        self, about: About, dtype: torch.dtype, numel: int, values: torch.Tensor, scale: LossScale = "none"
    ) -> None:
        """Take values that are a sample already, of a tensor with ``numel`` elements; the rest as ``add``."""
        if values.numel():
            self._taken.append(_Taken(about, dtype, numel, values.aminmax(), values, scale))

    @torch.no_grad()
    def finish(self, scale: torch.Tensor | None, skipped: torch.Tensor | None) -> list[Surveyed]:
        """Count, without waiting for any device.

        Args:
            scale: 0-dim tensor that the loss was multiplied by; None if it was not.
            skipped: 0-dim tensor that is not 0 if the optimizer's step changed nothing: then there are no updates.
        """
        devices = dict.fromkeys(taken.sample.device for taken in self._taken)
        return [
            Surveyed([taken for taken in self._taken if taken.sample.device == device], scale, skipped, bins=self._bins)
            for device in devices
        ]


class Surveyed:
    """The numbers of the tensors of one step on one device, on their way to the host."""

    def __init__(
        self, taken: Sequence[_Taken], scale: torch.Tensor | None, skipped: torch.Tensor | None, *, bins: bool
    ) -> None:
        device = taken[0].sample.device
        self._about = [(each.about, each.dtype, each.numel, each.scale) for each in taken]
        self._lengths = [each.sample.numel() for each in taken]
        self._bins = bins
        rows = len(taken)
        owners, places = _places(tuple(self._lengths), device)
        values = torch.cat([each.sample.float() for each in taken])
        bits = values.view(torch.int32) & 0x7FFF_FFFF
        kinds = torch.where(bits == 0, _ZERO, torch.where(bits > 0x7F80_0000, _NAN, bits >> 23))
        at = owners * _KINDS + kinds
        if device.type == "cpu":  # elsewhere bincount waits for the largest number
            counts = torch.bincount(at, minlength=rows * _KINDS)
        else:
            counts = torch.zeros(rows * _KINDS, dtype=torch.int64, device=device)
            counts.scatter_add_(0, at, torch.ones_like(at))
        magnitudes = values.abs()
        finite = torch.where(magnitudes < torch.inf, magnitudes, 0.0).double()
        squares = torch.zeros(rows, dtype=torch.float64, device=device).index_add_(0, owners, finite.square())
        smallest = torch.full((rows,), torch.inf, device=device).scatter_reduce_(
            0, owners, torch.where(bits == 0, torch.inf, magnitudes), "amin"
        )
        extremes = torch.stack([end.float() for each in taken for end in each.extremes]).abs()
        flags = [torch.ones((), device=device) if scale is None else scale, torch.zeros((), device=device)]
        if skipped is not None:
            flags[1] = skipped
        others = torch.stack([flag.detach().to(device, torch.float32, non_blocking=True) for flag in flags])
        self._numbers = Fetched(torch.cat([others, extremes, squares.float(), smallest, values[places]]))
        self._counts = Fetched(counts.int())

    @property
    def arrived(self) -> bool:
        """Whether ``rows`` need not wait."""
        return self._numbers.arrived and self._counts.arrived

    def rows(self) -> list[Row]:
        """The rows. Waits until the device has got so far."""
        numbers, counts = self._numbers.get(), self._counts.get().view(len(self._about), _KINDS)
        scale, skipped = numbers[:2].tolist()
        rows = len(self._about)
        extremes, squares, smallest, probes = numbers[2:].split([2 * rows, rows, rows, numbers.numel() - 2 - 4 * rows])
        amax, square_sums, least = extremes.view(rows, 2).amax(1).tolist(), squares.tolist(), smallest.tolist()
        values = [each.tolist() for each in probes.split([_probed(length) for length in self._lengths])]
        found: list[dict[int, int]] = [{} for _ in range(rows)]
        for (row, kind), count in zip(counts.nonzero().tolist(), counts[counts != 0].tolist(), strict=True):
            found[row][kind] = count
        made = []
        for i, (about, dtype, numel, met) in enumerate(self._about):
            if skipped and about.tensor == "update":
                continue
            kinds, size, divisor = found[i], self._lengths[i], scale if met == "in" else 1.0
            zeros, overflow, nan = (kinds.pop(kind, 0) / size for kind in (_ZERO, _INF, _NAN))
            shift = _BIAS + round(math.log2(divisor))
            made.append(
                Row(
                    *about,
                    dtype=str(dtype).removeprefix("torch."),
                    numel=numel,
                    amax=amax[i] / divisor,
                    smallest=least[i] / divisor,
                    rms=math.sqrt(square_sums[i] / size) / divisor,
                    zeros=zeros,
                    overflow=overflow,
                    nan=nan,
                    exponents={kind - shift: count for kind, count in kinds.items()} if self._bins else {},
                    scale=1.0 if met == "none" else scale,
                    probe=tuple(value / divisor for value in values[i]),
                )
            )
        return made


class Fetched:
    """A tensor on its way to the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._passed: torch.Event | None = None
        self._host = tensor
        if tensor.device.type != "cpu":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._passed = torch.Event(tensor.device)
            self._passed.record(torch.accelerator.current_stream(tensor.device))

    @property
    def arrived(self) -> bool:
        return self._passed is None or self._passed.query()

    def get(self) -> torch.Tensor:
        if self._passed is not None:
            self._passed.synchronize()
        return self._host


def _probed(length: int) -> int:
    return min(length, PROBE)


@functools.lru_cache(8)  # the steps of a training are alike
def _places(lengths: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """For samples that lie one after the other: to which row each element belongs, and where the probes are."""
    rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    starts = itertools.accumulate(lengths, initial=0)
    probes = [
        start + torch.arange(_probed(length)) * (length // _probed(length))
        for start, length in zip(starts, lengths, strict=False)
    ]
    return rows.to(device), torch.cat(probes).to(device)
