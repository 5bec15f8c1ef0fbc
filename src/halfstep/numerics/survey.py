"""Statistics of the tensors of one step, computed where they lie, and read when the device has computed them.

Of each tensor the largest magnitude is found in all of it. The rest is counted in a sample: every n-th element.
Exponents are taken from the bits of a float, which takes 0.05 of the time of a logarithm.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeGuard

import torch

from ..core.dtypes import dtype_name
from ..core.scalars import scalar_dtype
from ..kernels.shards import local
from ..observe.reading import Reading
from ..observe.row import PROBE, Row
from ..observe.samples import sample, samples_in

__all__ = ["About", "Callers", "Looked", "LossScale", "Param", "Survey", "can_survey"]

_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
_MAGNITUDE, _INFINITY = 0x7FFF_FFFF, 0x7F80_0000  # bits of a float32
_ZERO, _INF, _NAN, _KINDS = 0, 256, 257, 258
"""Of each number one of 258 kinds is counted: zero, 1 more than the 8 bits of its exponent (256 is inf), or NaN."""

_BIAS = 128  # of a kind
_MOST = 2**16  # numbers or counts of a block, unless one line has more: they stay in the cache of a core

Callers = tuple[tuple[str, tuple[int, ...]], ...]
"""The modules that ran when an output was made, the innermost first, and the numbers of what went into each."""

_Extremes = tuple[torch.Tensor, torch.Tensor]

LossScale = Literal["none", "in", "out"]
"""The part of the loss scale in some numbers: they never met it, are multiplied by it, or have been divided by it."""

Param = tuple[str, torch.dtype, torch.Tensor]
"""The name of a parameter, the dtype in which its numbers were computed, and a tensor of its shape."""


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


class _Samples(NamedTuple):
    """What was seen of tensors on one device: samples, one after the other, and the extremes of whole tensors."""

    looked: list[Looked]
    columns: list[torch.Tensor]
    extremes: list[_Extremes]
    places: dict[int, int]  # among the extremes, by the number of the tensor
    inputs: list[int]  # their numbers


class Survey:
    """The tensors of one step: looked at one by one, counted together, and read when the device has counted them.

    Between two ops of a model a function of Python is slow, because the ops have emptied the caches: ``add`` calls few.

    Args:
        count: how many elements of each to sample.
        step: which step it is.
    """

    def __init__(self, count: int, step: int) -> None:
        self._count = max(count, PROBE)
        self._step = step
        self._next = 0  # number of the next tensor
        self._samples: dict[torch.device, _Samples] = defaultdict(lambda: _Samples([], [], [], {}, []))
        self._flags = Reading()  # the loss scale, and whether the step was skipped
        self._ends: list[tuple[_Samples, Reading]] = []
        self._blocks: list[_Block] = []

    def __bool__(self) -> bool:
        return any(samples.looked for samples in self._samples.values())

    def add(
        self, module: str, kind: str, tensor: torch.Tensor, call: int, callers: Callers = (), like: int | None = None
    ) -> int:
        """Look at a tensor now, at the part of it that lies here: it may change or be freed afterwards.

        Args:
            module: the name of a module.
            kind: "output" or "output_grad".
            tensor: ``can_survey`` it.
            call: which call of the module.
            callers: as of ``Looked``.
            like: the number that it has as an input, if it has been one.

        Returns:
            Its number, as of ``Looked``.
        """
        number, here = self._next, local(tensor.detach())
        self._next += 1
        size, samples = here.numel(), self._samples[here.device]
        if size > self._count:
            place = None if like is None else samples.places.get(like)
            samples.places[number] = _look(samples, here) if place is None else place
        if size:
            column = sample(here, self._count)
            about = About(self._step, module, kind, call, dtype_name(tensor.dtype), size)
            scale: LossScale = "none" if kind == "output" else "in"
            samples.looked.append(Looked(number, about, column.numel(), scale, callers))
            samples.columns.append(column.to(torch.float32, copy=True))
        return number

    def add_input(self, tensor: torch.Tensor) -> int:
        """See whether a tensor that goes into a module is finite; its number, as that of ``add``."""
        number, here = self._next, local(tensor.detach())
        self._next += 1
        if here.numel():
            samples = self._samples[here.device]
            samples.inputs.append(number)
            samples.places[number] = _look(samples, here)
        return number

    def add_params(
        self, kind: str, params: Iterable[Param], column: torch.Tensor, scale: LossScale = "none", whole: bool = False
    ) -> None:
        """Take float32 samples of parameters on one device, which nobody changes.

        Args:
            kind: "grad", "weight" or "update".
            params: which ones.
            column: the samples, one after the other.
            scale: as of ``Looked``.
            whole: whether to find the extremes of the tensors.
        """
        samples = self._samples[column.device]
        samples.columns.append(column)
        for name, dtype, tensor in params:
            here = local(tensor)
            about = About(self._step, name, kind, 0, dtype_name(dtype), here.numel())
            if whole and about.numel > self._count:
                samples.places[self._next] = _look(samples, here.detach())
            if about.numel:
                samples.looked.append(Looked(self._next, about, samples_in(here, self._count), scale, ()))
            self._next += 1

    @torch.no_grad()
    def finish(self, scale: torch.Tensor | None, skipped: torch.Tensor | None) -> None:
        """Count, without waiting for any device.

        Args:
            scale: 0-dim tensor that the loss was multiplied by; None if it was not.
            skipped: 0-dim tensor that is not 0 if the optimizer's step changed nothing: then there are no updates.
        """
        for flag, default in ((scale, 1.0), (skipped, 0.0)):
            known = torch.tensor(default, dtype=torch.float32, device="cpu") if flag is None else flag.detach()
            self._flags.ask(known.to(torch.float32, copy=True))
        self._flags.send()
        for device, samples in self._samples.items():
            if samples.extremes:
                ends = torch.stack([end.float() for pair in samples.extremes for end in pair])
                self._ends.append((samples, Reading(ends.view(-1, 2)).send()))
            values = torch.cat([*samples.columns, torch.zeros(1, dtype=torch.float32, device=device)])
            places = _places(tuple(looked.sampled for looked in samples.looked), device)
            lines = max(_MOST // max(places[0].shape[1], _KINDS), 1)
            for at in range(0, len(samples.looked), lines):
                of = (values.index_select(0, p[at : at + lines].flatten()).view(-1, p.shape[1]) for p in places)
                self._blocks.append(_counted(samples.looked[at : at + lines], *of))
            samples.columns.clear()
            samples.extremes.clear()

    @property
    def ready(self) -> bool:
        """Whether ``rows`` returns without waiting."""
        sent = chain([self._flags], (ends for _, ends in self._ends), (block.read for block in self._blocks))
        return all(each.ready for each in sent)

    def rows(self, *, bins: bool, brief: bool = False) -> list[tuple[Looked, Row]]:
        """The rows in the order in which tensors were looked at, with what is known of each.

        Args:
            bins: whether they have histograms.
            brief: whether they have no more than ``amax``, ``rms`` and ``zeros``, which takes less time.
        """
        scale, skipped = map(float, self._flags.get() or (1.0, 0.0))
        whole: dict[int, float] = {}
        for samples, ends in self._ends:
            largest = ends.get()[0].abs().amax(1).tolist()
            whole.update((number, largest[place]) for number, place in samples.places.items())
        found = [each for block in self._blocks for each in block.rows(scale, whole, bins, brief)]
        found = [each for each in found if not (skipped and each[0].about.tensor == "update")]
        return sorted(found, key=lambda each: each[0].number)

    def bad_inputs(self) -> set[int]:
        """The numbers of inputs with inf or NaN. A mask of 0 and -inf is none of them: it is meant to be so."""
        found = ((each, sent.get()[0].tolist()) for each, sent in self._ends)
        ends = {number: pairs[each.places[number]] for each, pairs in found for number in each.inputs}
        return {n for n, pair in ends.items() if not all(map(math.isfinite, pair)) and pair != [-math.inf, 0.0]}


class _Block(NamedTuple):
    """The numbers of some tensors on one device, a line for each, on their way to the host."""

    looked: list[Looked]
    width: int
    read: Reading

    def rows(self, scale: float, whole: dict[int, float], bins: bool, brief: bool) -> Iterator[tuple[Looked, Row]]:
        """The rows, with the largest magnitudes of whole tensors by their numbers."""
        numbers, probes, counts = self.read.get()
        counts = counts.view(len(self.looked), _KINDS)
        lines = zip(self.looked, numbers.T.tolist(), counts[:, _ZERO].tolist(), strict=True)
        found = None if brief else zip(_kinds(counts), probes.tolist(), strict=True)
        for looked, (amax, norm, smallest), zeros in lines:
            size, divisor = looked.sampled, scale if looked.scale == "in" else 1.0
            amax = whole.get(looked.number, amax)
            row = Row(
                *looked.about,
                amax=amax / divisor,
                rms=norm / math.sqrt(size) / divisor,
                zeros=(zeros - (self.width - size)) / size,
                scale=1.0 if looked.scale == "none" else scale,
            )
            if found is not None:
                kinds, probe = next(found)
                overflow, nan = kinds.pop(_INF, 0) / size, kinds.pop(_NAN, 0) / size
                shift = _BIAS + round(math.log2(divisor))
                row = replace(
                    row,
                    smallest=math.nan if nan else smallest / divisor,
                    overflow=max(overflow, math.isinf(amax) / row.numel),  # which the sample need not have
                    nan=max(nan, math.isnan(amax) / row.numel),
                    exponents={kind - shift: count for kind, count in kinds.items()} if bins else {},
                    probe=tuple(value / divisor for value in probe[: min(size, PROBE)]),
                )
            yield looked, row


@functools.lru_cache(4)  # every sampled step asks for the same
def _places(sampled: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The indices of samples and of probes in a column that has the samples of all tensors and then one zero.

    There is a line for each tensor. Lines of samples have one length: the rest of a line is the index of the zero.
    """
    sizes = torch.tensor(sampled, dtype=torch.int64, device="cpu").to(device, non_blocking=True)[:, None]
    starts = sizes.cumsum(0) - sizes
    place = torch.arange(max((PROBE, *sampled)), dtype=torch.int64, device=device)
    probes = (place[:PROBE] * (sizes // sizes.clamp(max=PROBE))).minimum(sizes - 1)
    return (starts + place).masked_fill_(place >= sizes, sum(sampled)), starts + probes


def _counted(looked: list[Looked], numbers: torch.Tensor, probes: torch.Tensor) -> _Block:
    """Count the numbers of some tensors, of which each has a line."""
    lines, width = numbers.shape
    bits = numbers.view(torch.int32) & _MAGNITUDE
    kinds = (bits >> 23) + bits.clamp(max=1) + (bits - _INFINITY).clamp_(0, 1)
    kinds += torch.arange(0, lines * _KINDS, _KINDS, dtype=torch.int32, device=bits.device)[:, None]
    if bits.device.type == "cpu":  # elsewhere bincount waits for the largest number
        counts = torch.bincount(kinds.flatten(), minlength=lines * _KINDS)
    else:
        counts = torch.zeros(lines * _KINDS, dtype=torch.int32, device=bits.device)
        counts.scatter_add_(0, kinds.flatten().long(), counts.new_ones(1).expand(kinds.numel()))
    amax = bits.amax(1).view(torch.float32)
    smallest = ((bits - 1) & _MAGNITUDE).amin(1).clamp_(max=_INFINITY - 1).add_(1).view(torch.float32)  # inf: all are 0
    finite = bits.view(torch.float32).nan_to_num_(0.0, 0.0)
    norms = torch.linalg.vector_norm(finite, dim=1, dtype=scalar_dtype(bits.device)).float()
    counts = counts.to(torch.int16 if width < 2**15 else torch.int32)
    return _Block(looked, width, Reading(torch.stack([amax, norms, smallest]), probes, counts).send())


def _look(samples: _Samples, here: torch.Tensor) -> int:
    """Find the extremes of a tensor; the place where they are."""
    if not here.is_contiguous():  # torch would copy it; in the order of its strides it mostly is contiguous
        here = here.permute(sorted(range(here.dim()), key=here.stride().__getitem__, reverse=True))
    samples.extremes.append(here.aminmax())
    return len(samples.extremes) - 1


def can_survey(tensor: Any) -> TypeGuard[torch.Tensor]:
    """Whether it is a tensor whose numbers can be looked at: real, dense, of 16 bits or more, and not empty."""
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.dtype in _DTYPES
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.numel() > 0
        and not tensor.is_meta
    )


def _kinds(counts: torch.Tensor) -> list[dict[int, int]]:
    """The counts of each line that are not 0, but for zeros, by kind."""
    found: list[dict[int, int]] = [{} for _ in counts]
    for (line, kind), count in zip(counts.nonzero().tolist(), counts[counts != 0].tolist(), strict=True):
        if kind != _ZERO:
            found[line][kind] = count
    return found
