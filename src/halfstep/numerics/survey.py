"""Statistics of the tensors of one step, computed where they lie, and read when the device has computed them.

Of each tensor the largest magnitude is found in all of it. The rest is counted in a sample: every n-th element.
Exponents are taken from the bits of a float, which is 20 times faster than a logarithm.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch

from ..core.scalars import scalar_dtype
from ..kernels.shards import local
from ..observe.reading import Reading
from ..observe.row import PROBE, Row
from ..observe.samples import sample

__all__ = ["About", "Callers", "Looked", "Survey", "can_survey"]

_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
_ZERO, _NAN, _INF, _KINDS = 256, 257, 255, 258
"""Of each number one of 258 kinds is counted: the 8 bits of its exponent, of which 255 is inf, or zero, or NaN."""

_BIAS = 127
_MOST = 2**16  # numbers of a block, unless one line has more
_LINES = 64  # of a block: with 1,024 numbers each it stays in the cache of a core

Callers = tuple[tuple[str, tuple[int, ...]], ...]
"""The modules that ran when an output was made, the innermost first, and the numbers of what went into each."""

_Extremes = tuple[torch.Tensor, torch.Tensor]

LossScale = Literal["none", "in", "out"]
"""The part of the loss scale in some numbers: they never met it, are multiplied by it, or have been divided by it."""


class About(NamedTuple):
    """Which tensor a row is about: the attributes of ``Row`` that are known before its numbers are."""

    step: int
    module: str
    tensor: str
    call: int
    dtype: str
    numel: int


class Looked(NamedTuple):
    """A tensor that was looked at.

    Attributes:
        number: its place among the tensors of the step, in the order in which they were looked at.
        about: which one it is.
        sampled: how many of its numbers are counted.
        scale: what the loss scale has to do with it.
        callers: of an output.
    """

    number: int
    about: About
    sampled: int
    scale: LossScale
    callers: Callers


_Sample = tuple[Looked, torch.Tensor, _Extremes | None]
"""A tensor, its numbers before they are counted, and its extremes if these are not all of them."""


class Survey:
    """The tensors of one step: looked at one by one, counted together, and read when the device has counted them.

    Args:
        count: how many elements of each to sample.
    """

    def __init__(self, count: int) -> None:
        self._count = max(count, PROBE)
        self._next = 0  # number of the next tensor
        self._samples: list[_Sample] = []
        self._inputs: dict[torch.device, list[tuple[int, _Extremes]]] = {}
        self._blocks: list[_Block] = []
        self._ends: list[tuple[list[int], Reading]] = []

    def __bool__(self) -> bool:
        return bool(self._samples or self._blocks)

    def add(self, about: About, tensor: torch.Tensor, *, scale: LossScale = "none", callers: Callers = ()) -> int:
        """Look at a tensor now, at the part of it that lies here: it may change or be freed afterwards.

        Args:
            about: which one it is, with the dtype in which its numbers were computed, and how many are here.
            tensor: ``can_survey`` it.
            scale: what the loss scale has to do with it.
            callers: the modules that run.

        Returns:
            Its number among the tensors of the step, in the order in which they were looked at.
        """
        here = local(tensor.detach())
        values = sample(here, self._count)
        extremes = here.aminmax() if values.numel() < here.numel() else None
        return self.add_values(about, values.to(torch.float32, copy=True), scale, extremes, callers)

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
        values: torch.Tensor,
        scale: LossScale = "none",
        extremes: _Extremes | None = None,
        callers: Callers = (),
    ) -> int:
        """Take float32 values that are a sample already, and that nobody changes.

        Args:
            about: as for ``add``.
            values: some of its numbers.
            scale: as for ``add``.
            extremes: the least and the largest of all of them, if known.
            callers: as for ``add``.
        """
        number, self._next = self._next, self._next + 1
        if about.numel:
            looked = Looked(number, about, values.numel(), scale, callers)
            self._samples.append((looked, values, extremes))
        return number

    @torch.no_grad()
    def finish(self, scale: torch.Tensor | None, skipped: torch.Tensor | None) -> None:
        """Count, without waiting for any device.

        Args:
            scale: 0-dim tensor that the loss was multiplied by; None if it was not.
            skipped: 0-dim tensor that is not 0 if the optimizer's step changed nothing: then there are no updates.
        """
        widths: dict[tuple[torch.device, int], list[_Sample]] = {}
        for each in self._samples:
            looked, values, _ = each
            width = min(self._count, max(PROBE, 1 << (looked.sampled - 1).bit_length()))
            widths.setdefault((values.device, width), []).append(each)
        for (_, width), found in widths.items():
            lines = max(min(_LINES, _MOST // width), 1)
            parts = (found[at : at + lines] for at in range(0, len(found), lines))
            self._blocks += [_counted(part, width, scale, skipped) for part in parts]
        for ends in self._inputs.values():
            self._ends.append(([number for number, _ in ends], Reading(_stacked(each for _, each in ends)).send()))
        self._samples, self._inputs = [], {}

    @property
    def ready(self) -> bool:
        """Whether ``rows`` returns without waiting."""
        return all(block.read.ready for block in self._blocks) and all(fetched.ready for _, fetched in self._ends)

    def rows(self, *, bins: bool, brief: bool = False) -> list[tuple[Looked, Row]]:
        """The rows in the order in which tensors were looked at, with what is known of each.

        Args:
            bins: whether they have histograms.
            brief: whether they have no more than ``amax``, ``rms`` and ``zeros``, which takes less time.
        """
        found = [each for block in self._blocks for each in block.rows(bins=bins, brief=brief)]
        return sorted(found, key=lambda each: each[0].number)

    def bad_inputs(self) -> set[int]:
        """The numbers of inputs with inf or NaN. A mask of 0 and -inf is none of them: it is meant to be so."""
        return {
            number
            for numbers, fetched in self._ends
            for number, (least, largest) in zip(numbers, fetched.get()[0].tolist(), strict=True)
            if not (math.isfinite(least) and math.isfinite(largest)) and (least, largest) != (-math.inf, 0.0)
        }


class _Block(NamedTuple):
    """The numbers of some tensors on one device, on their way to the host: of each a line."""

    looked: list[Looked]
    width: int
    read: Reading

    def rows(self, *, bins: bool, brief: bool) -> Iterator[tuple[Looked, Row]]:
        numbers, probes, counts = self.read.get()
        counts = counts.view(len(self.looked), _KINDS)
        zeros = counts[:, _ZERO].tolist()
        found = None if brief else zip(_kinds(counts), probes.tolist(), strict=True)
        for i, (scale, skipped, amax, norm, smallest) in enumerate(numbers.T.tolist()):
            looked, size = self.looked[i], self.looked[i].sampled
            kinds, probe = ({}, []) if found is None else next(found)
            if skipped and looked.about.tensor == "update":
                continue
            divisor = scale if looked.scale == "in" else 1.0
            row = Row(
                *looked.about,
                amax=amax / divisor,
                rms=norm / math.sqrt(size) / divisor,
                zeros=(zeros[i] - (self.width - size)) / size,
                scale=1.0 if looked.scale == "none" else scale,
            )
            if not brief:
                overflow, nan = kinds.pop(_INF, 0) / size, kinds.pop(_NAN, 0) / size
                shift = _BIAS + round(math.log2(divisor))
                row = replace(
                    row,
                    smallest=smallest / divisor,
                    overflow=max(overflow, math.isinf(amax) / row.numel),  # which the sample need not have
                    nan=max(nan, math.isnan(amax) / row.numel),
                    exponents={kind - shift: count for kind, count in kinds.items()} if bins else {},
                    probe=tuple(value / divisor for value in probe[: min(size, PROBE)]),
                )
            yield looked, row


def _counted(
    samples: Sequence[_Sample], width: int, scale: torch.Tensor | None, skipped: torch.Tensor | None
) -> _Block:
    """Count samples, as lines of ``width`` numbers that are filled up with zeros; the rest as for ``Survey.finish``."""
    looked = [each for each, _, _ in samples]
    device, lines = samples[0][1].device, len(samples)
    values = torch.cat(list(_padded((values for _, values, _ in samples), width))).view(lines, width)
    bits = values.view(torch.int32) & 0x7FFF_FFFF
    kinds = (bits >> 23).masked_fill_(bits == 0, _ZERO).masked_fill_(bits > 0x7F80_0000, _NAN)
    kinds += torch.arange(0, lines * _KINDS, _KINDS, dtype=torch.int32, device=device)[:, None]
    if device.type == "cpu":  # elsewhere bincount waits for the largest number
        counts = torch.bincount(kinds.flatten(), minlength=lines * _KINDS)
    else:
        counts = torch.zeros(lines * _KINDS, dtype=torch.int32, device=device)
        counts.scatter_add_(0, kinds.flatten().long(), counts.new_ones(1).expand(kinds.numel()))
    magnitudes = bits.view(torch.float32)
    amax = magnitudes.amax(1)
    whole = {line: ends for line, (_, _, ends) in enumerate(samples) if ends is not None}
    if whole:
        at = _on(tuple(whole), device)
        amax[at] = torch.maximum(amax[at], _stacked(whole.values()).abs().amax(1))
    smallest = magnitudes.masked_fill(bits == 0, torch.inf).amin(1)
    finite = magnitudes.masked_fill_(bits >= 0x7F80_0000, 0.0)
    norms = torch.linalg.vector_norm(finite, dim=1, dtype=scalar_dtype(device)).float()
    flags = [
        torch.ones((), dtype=torch.float32) if scale is None else scale,
        torch.zeros((), dtype=torch.float32) if skipped is None else skipped,
    ]
    columns = [flag.detach().to(device, torch.float32).expand(lines) for flag in flags]
    probes = values.gather(1, _probes(tuple(each.sampled for each in looked), device))
    numbers = torch.stack([*columns, amax, norms, smallest])
    counts = counts.to(torch.int16 if width < 2**15 else torch.int32)
    return _Block(looked, width, Reading(numbers, probes, counts).send())


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


def _kinds(counts: torch.Tensor) -> Iterator[dict[int, int]]:
    """The counts of each line that are not 0, but for zeros, by kind."""
    found: list[dict[int, int]] = [{} for _ in counts]
    for (line, kind), count in zip(counts.nonzero().tolist(), counts[counts != 0].tolist(), strict=True):
        found[line][kind] = count
    for kinds in found:
        kinds.pop(_ZERO, None)
        yield kinds


def _padded(samples: Iterable[torch.Tensor], width: int) -> Iterator[torch.Tensor]:
    """The samples, each followed by the zeros that make it as long as a line."""
    zeros: dict[int, torch.Tensor] = {}
    for values in samples:
        yield values
        rest = width - values.numel()
        if rest:
            if rest not in zeros:
                zeros[rest] = torch.zeros(rest, dtype=torch.float32, device=values.device)
            yield zeros[rest]


def _stacked(extremes: Iterable[_Extremes]) -> torch.Tensor:
    return torch.stack([end.float() for pair in extremes for end in pair]).view(-1, 2)


@functools.lru_cache(64)  # the steps of a training are alike
def _probes(sampled: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """For lines with so many numbers, where their probes are: [lines, ``PROBE``]."""
    distances = torch.tensor([size // min(size, PROBE) for size in sampled], dtype=torch.int64)
    last = torch.tensor([size - 1 for size in sampled], dtype=torch.int64)
    return (torch.arange(PROBE) * distances[:, None]).minimum(last[:, None]).to(device)


@functools.lru_cache(64)
def _on(numbers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=device)
