"""Statistics of the tensors of one step, computed where they lie, and read when the device has computed them.

Of each tensor the largest magnitude is found in all of it. The rest is counted in a sample: every n-th element.
Exponents are taken from the bits of a float, which is 20 times faster than a logarithm.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import torch

from ..core.scalars import scalar_dtype
from ..kernels.shards import local
from ..observe.fetched import Fetched
from ..observe.row import PROBE, Row
from ..observe.samples import sample

__all__ = ["About", "Callers", "Inputs", "SampledTensor", "Survey", "Surveyed", "can_survey"]

_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
_ZERO, _NAN, _INF, _KINDS = 256, 257, 255, 258
"""Of each number one of 258 kinds is counted: the 8 bits of its exponent, of which 255 is inf, or zero, or NaN."""

_BIAS = 127
_MOST = 2**16  # numbers of a block, unless one line has more
_LINES = 64  # of a block: with 1,024 numbers each it stays in the cache of a core


Callers = tuple[tuple[str, tuple[int, ...]], ...]
_Extremes = tuple[torch.Tensor, torch.Tensor]

LossScale = Literal["none", "in", "out"]
"""The part of the loss scale in some numbers: they never met it, are multiplied by it, or have been divided by it."""


class About(NamedTuple):
    """Which tensor a row is about; see ``Row``."""

    step: int
    module: str
    tensor: str
    call: int = 0


class SampledTensor(NamedTuple):
    """The facts about a tensor that was looked at, as far as the host knows them.

    Attributes:
        number: its place among the tensors of the step, in the order in which they were looked at.
        about: which one it is.
        dtype: in which its numbers were computed.
        numel: how many it has.
        sampled: how many of them are counted.
        scale: what the loss scale has to do with it.
        callers: of an output, the modules that ran, the innermost first, and the numbers of what went into each.
    """

    number: int
    about: About
    dtype: torch.dtype
    numel: int
    sampled: int
    scale: LossScale
    callers: Callers


class _Block:
    """The samples of some tensors on one device: for each a line of float32 numbers, filled up with zeros.

    Attributes:
        tensors: which tensors.
        values: the lines.
        extremes: the least and the largest number of whole tensors, by line.
    """

    def __init__(self, device: torch.device, width: int) -> None:
        self.tensors: list[SampledTensor] = []
        self.values = torch.zeros(max(min(_LINES, _MOST // width), 1), width, dtype=torch.float32, device=device)
        self.extremes: dict[int, _Extremes] = {}


class Survey:
    """The tensors of one step.

    Args:
        count: how many elements of each to sample.
    """

    def __init__(self, count: int) -> None:
        self._count = max(count, PROBE)
        self._next = 0  # number of the next tensor
        self._inputs: dict[torch.device, list[tuple[int, _Extremes]]] = {}
        self._blocks: list[_Block] = []
        self._open: dict[tuple[torch.device, int], _Block] = {}

    @torch.no_grad()
    def add(
        self,
        about: About,
        tensor: torch.Tensor,
        *,
        dtype: torch.dtype | None = None,
        scale: LossScale = "none",
        callers: Callers = (),
    ) -> int:
        """Look at a tensor now, at the part of it that lies here: it may change or be freed afterwards.

        Args:
            about: which one it is.
            tensor: ``can_survey`` it.
            dtype: in which the numbers were computed, if not in that of the tensor.
            scale: what the loss scale has to do with it.
            callers: the modules that run, the innermost first, and the numbers of what went into each.

        Returns:
            Its number among the tensors of the step, in the order in which they were looked at.
        """
        here = local(tensor.detach())
        values = sample(here, self._count)
        extremes = here.aminmax() if values.numel() < here.numel() else None
        return self.add_values(about, dtype or tensor.dtype, here.numel(), values, scale, extremes, callers)

    @torch.no_grad()
    def add_input(self, tensor: torch.Tensor) -> int:
        """See whether a tensor that goes into a module is finite.

        Returns:
            Its number, as that of ``add``.
        """
        here = local(tensor.detach())
        number, self._next = self._next, self._next + 1
        if here.numel():
            self._inputs.setdefault(here.device, []).append((number, here.aminmax()))
        return number

    def add_values(
        self,
        about: About,
        dtype: torch.dtype,
        numel: int,
        values: torch.Tensor,
        scale: LossScale = "none",
        extremes: _Extremes | None = None,
        callers: Callers = (),
    ) -> int:
        """Take values that are a sample already.

        Args:
            about: of which tensor.
            dtype: in which its numbers were computed.
            numel: how many it has.
            values: some of them.
            scale: as for ``add``.
            extremes: the least and the largest of all of them, if known.
            callers: as for ``add``.
        """
        number, self._next = self._next, self._next + 1
        if not numel:
            return number
        width = min(self._count, max(PROBE, 1 << (values.numel() - 1).bit_length()))
        block = self._open.get((values.device, width))
        if block is None or len(block.tensors) == len(block.values):
            block = self._open[values.device, width] = _Block(values.device, width)
            self._blocks.append(block)
        line = len(block.tensors)
        block.values[line, : values.numel()].copy_(values)
        if extremes is not None:
            block.extremes[line] = extremes
        block.tensors.append(SampledTensor(number, about, dtype, numel, values.numel(), scale, callers))
        return number

    def finish_inputs(self) -> Inputs:
        """The results of ``add_input``, without waiting for any device."""
        return Inputs(self._inputs)

    def finish(self, scale: torch.Tensor | None, skipped: torch.Tensor | None) -> list[Surveyed]:
        """Count, without waiting for any device.

        Args:
            scale: 0-dim tensor that the loss was multiplied by; None if it was not.
            skipped: 0-dim tensor that is not 0 if the optimizer's step changed nothing: then there are no updates.
        """
        return [Surveyed(block, scale, skipped) for block in self._blocks]


class Surveyed:
    """The numbers of some tensors of one step, on their way to the host."""

    @torch.no_grad()
    def __init__(self, block: _Block, scale: torch.Tensor | None, skipped: torch.Tensor | None) -> None:
        self._tensors = block.tensors
        rows, device = len(block.tensors), block.values.device
        values = block.values[:rows]
        bits = values.view(torch.int32) & 0x7FFF_FFFF
        kinds = (bits >> 23).masked_fill_(bits == 0, _ZERO).masked_fill_(bits > 0x7F80_0000, _NAN)
        kinds += torch.arange(0, rows * _KINDS, _KINDS, dtype=torch.int32, device=device)[:, None]
        if device.type == "cpu":  # elsewhere bincount waits for the largest number
            counts = torch.bincount(kinds.flatten(), minlength=rows * _KINDS)
        else:
            counts = torch.zeros(rows * _KINDS, dtype=torch.int32, device=device)
            counts.scatter_add_(0, kinds.flatten().long(), counts.new_ones(1).expand(kinds.numel()))
        magnitudes = bits.view(torch.float32)
        amax = magnitudes.amax(1)
        if block.extremes:
            lines = _on(tuple(block.extremes), device)
            ends = _stacked(block.extremes.values()).abs()
            amax[lines] = torch.maximum(amax[lines], ends.amax(1))
        smallest = magnitudes.masked_fill(bits == 0, torch.inf).amin(1)
        finite = magnitudes.masked_fill_(bits >= 0x7F80_0000, 0.0)
        squares = torch.linalg.vector_norm(finite, dim=1, dtype=scalar_dtype(device))
        probes = values.gather(1, _probes(tuple(each.sampled for each in block.tensors), device))
        flags = [
            torch.ones((), dtype=torch.float32) if scale is None else scale,
            torch.zeros((), dtype=torch.float32) if skipped is None else skipped,
        ]
        self._width = values.shape[1]
        self._flags = Fetched(torch.stack([flag.detach().to(device, torch.float32) for flag in flags]))
        self._numbers = Fetched(torch.stack([amax, squares.float(), smallest]))
        self._probes = Fetched(probes)
        self._counts = Fetched(counts.to(torch.int16 if self._width < 2**15 else torch.int32))

    @property
    def ready(self) -> bool:
        """Whether nothing here need wait."""
        return all(each.ready for each in (self._flags, self._numbers, self._probes, self._counts))

    def brief(self) -> list[tuple[SampledTensor, Row]]:
        """The rows with no more than ``amax``, ``rms`` and ``zeros``, and what is known of each tensor."""
        scale, skipped = self._flags.get().tolist()
        zeros = self._counts.get().view(len(self._tensors), _KINDS)[:, _ZERO].tolist()
        largest, norms, _ = self._numbers.get().tolist()
        found = []
        for tensor, amax, norm, zero in zip(self._tensors, largest, norms, zeros, strict=True):
            if skipped and tensor.about.tensor == "update":
                continue
            size, divisor = tensor.sampled, scale if tensor.scale == "in" else 1.0
            row = Row(
                *tensor.about,
                dtype=str(tensor.dtype).removeprefix("torch."),
                numel=tensor.numel,
                amax=amax / divisor,
                rms=norm / math.sqrt(size) / divisor,
                zeros=(zero - (self._width - size)) / size,
                scale=1.0 if tensor.scale == "none" else scale,
            )
            found.append((tensor, row))
        return found

    def rows(self, *, bins: bool) -> list[tuple[SampledTensor, Row]]:
        """The rows, with histograms or without, and what is known of each tensor."""
        counts = self._counts.get().view(len(self._tensors), _KINDS)
        found: list[dict[int, int]] = [{} for _ in self._tensors]
        for (line, kind), count in zip(counts.nonzero().tolist(), counts[counts != 0].tolist(), strict=True):
            found[line][kind] = count
        scale, skipped = self._flags.get().tolist()
        amax, norms, smallest = self._numbers.get().tolist()
        made = []
        for i, (tensor, probe) in enumerate(zip(self._tensors, self._probes.get().tolist(), strict=True)):
            if skipped and tensor.about.tensor == "update":
                continue
            kinds, size, divisor = found[i], tensor.sampled, scale if tensor.scale == "in" else 1.0
            zeros = kinds.pop(_ZERO, 0) - (self._width - size)
            overflow, nan = kinds.pop(_INF, 0) / size, kinds.pop(_NAN, 0) / size
            if math.isinf(amax[i]):  # which the sample need not have
                overflow = max(overflow, 1 / tensor.numel)
            elif math.isnan(amax[i]):
                nan = max(nan, 1 / tensor.numel)
            shift = _BIAS + round(math.log2(divisor))
            row = Row(
                *tensor.about,
                dtype=str(tensor.dtype).removeprefix("torch."),
                numel=tensor.numel,
                amax=amax[i] / divisor,
                smallest=smallest[i] / divisor,
                rms=norms[i] / math.sqrt(size) / divisor,
                zeros=zeros / size,
                overflow=overflow,
                nan=nan,
                exponents={kind - shift: count for kind, count in kinds.items()} if bins else {},
                scale=1.0 if tensor.scale == "none" else scale,
                probe=tuple(value / divisor for value in probe[: _probed(size)]),
            )
            made.append((tensor, row))
        return made


def can_survey(tensor: Any) -> bool:
    """Whether it is a tensor whose numbers can be looked at: real, dense, of 16 bits or more, and not empty."""
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.dtype in _DTYPES
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.numel() > 0
        and tensor.device.type != "meta"
    )


class Inputs:
    """The answers whether tensors that went into modules are finite, on their way to the host."""

    def __init__(self, seen: dict[torch.device, list[tuple[int, _Extremes]]]) -> None:
        self._numbers = [[number for number, _ in each] for each in seen.values()]
        self._extremes = [Fetched(_stacked(ends for _, ends in each)) for each in seen.values()]

    @property
    def ready(self) -> bool:
        """Whether ``bad`` returns without waiting."""
        return all(each.ready for each in self._extremes)

    def bad(self) -> set[int]:
        """The numbers of those with inf or NaN. A mask of 0 and -inf is none of them: it is meant to be so."""
        return {
            number
            for numbers, fetched in zip(self._numbers, self._extremes, strict=True)
            for number, (least, largest) in zip(numbers, fetched.get().tolist(), strict=True)
            if not (math.isfinite(least) and math.isfinite(largest)) and (least, largest) != (-math.inf, 0.0)
        }


def _stacked(extremes: Iterable[_Extremes]) -> torch.Tensor:
    return torch.stack([end.float() for pair in extremes for end in pair]).view(-1, 2)


def _probed(sampled: int) -> int:
    return min(sampled, PROBE)


@functools.lru_cache(64)  # the steps of a training are alike
def _probes(sampled: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """For lines with so many numbers, where their probes are: [lines, ``PROBE``]."""
    distances = torch.tensor([size // _probed(size) for size in sampled], dtype=torch.int64)
    last = torch.tensor([size - 1 for size in sampled], dtype=torch.int64)
    return (torch.arange(PROBE) * distances[:, None]).minimum(last[:, None]).to(device)


@functools.lru_cache(64)
def _on(numbers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=device)
