"""Statistics of the tensors of one step, computed on their devices and read when they are ready.

The largest magnitude is exact. All other statistics come from a sample: every n-th element. Exponents are read from
the bits of each float, which is 20 times faster than a logarithm.
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

from ...core.dtypes import dtype_name
from ...core.scalars import scalar_dtype
from ...kernels.shards import local
from ..observe.names import OUTSIDE, ROOT
from ..observe.reading import Reading
from ..observe.row import PROBE, Row, merge_rows
from ..observe.samples import can_sample, sample, samples_in

__all__ = ["Callers", "LossScale", "Param", "TensorSampler", "can_survey"]

_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
_MAGNITUDE, _INFINITY = 0x7FFF_FFFF, 0x7F80_0000  # bits of a float32
_ZERO, _INF, _NAN, _KINDS = 0, 256, 257, 258
"""Histogram bins: zero, 256 exponents plus 1 (256 is inf), and NaN."""

_BIAS = 128  # of a bin
_MOST = 2**16  # numbers or counts per block (more if one line has more): they fit into the cache of a core

Callers = tuple[tuple[str, tuple[int, ...]], ...]
"""The modules that were running when an output was computed, the innermost first, with the indices of their inputs."""

_Extremes = tuple[torch.Tensor, torch.Tensor]

LossScale = Literal["none", "in", "out"]
"""The relation of values to the loss scale: unrelated, multiplied by it, or already divided by it."""

Param = tuple[str, torch.dtype, torch.Tensor]
"""The name of a parameter, the dtype in which its values were computed, and a tensor of its shape."""


class TensorId(NamedTuple):
    """The identity of a row's tensor: the attributes of ``Row`` that are known before its statistics."""

    step: int
    module: str
    tensor: str
    call: int
    dtype: str
    numel: int


class Sampled(NamedTuple):
    """A sampled tensor.

    Attributes:
        number: the index among the sampled tensors of the step.
        about: the identity of the tensor.
        sampled: the number of its elements that are counted.
        scale: the relation of its values to the loss scale.
        callers: for an output, the running modules.
    """

    number: int
    about: TensorId
    sampled: int
    scale: LossScale
    callers: Callers


class _Samples(NamedTuple):
    """The data of tensors on one device: concatenated samples, and the extremes of whole tensors."""

    looked: list[Sampled]
    columns: list[torch.Tensor]
    extremes: list[_Extremes]
    places: dict[int, int]  # indices in ``extremes`` by tensor number
    inputs: list[int]  # tensor numbers


class TensorSampler:
    """The tensors of one step: sampled one by one, counted together, and read when the device has counted.

    Python is slow between two ops of a model, because the ops evict the caches; so ``add`` makes few calls.

    Args:
        count: the number of elements to sample of each tensor.
        step: the index of the step.
    """

    def __init__(self, count: int, step: int) -> None:
        self._count = max(count, PROBE)
        self._step = step
        self._next = 0  # index of the next tensor
        self._samples: dict[torch.device, _Samples] = defaultdict(lambda: _Samples([], [], [], {}, []))
        self._flags = Reading()  # the loss scale, and the flag of a skipped step
        self._ends: list[tuple[_Samples, Reading]] = []
        self._blocks: list[_Block] = []

    def __bool__(self) -> bool:
        return any(samples.looked for samples in self._samples.values())

    def add(
        self, module: str, kind: str, tensor: torch.Tensor, call: int, callers: Callers = (), like: int | None = None
    ) -> int:
        """Sample the local part of a tensor now; user code may change or free it afterwards.

        Args:
            module: the name of a module.
            kind: "output" or "output_grad".
            tensor: a tensor that ``can_survey`` accepts.
            call: the index of the module's call.
            callers: see ``Sampled``.
            like: the index that the tensor got as an input, if any.

        Returns:
            The index of the tensor; see ``Sampled``.
        """
        number, here = self._next, local(tensor.detach())
        self._next += 1
        size, samples = here.numel(), self._samples[here.device]
        if size > self._count:
            place = None if like is None else samples.places.get(like)
            samples.places[number] = _look(samples, here) if place is None else place
        if size:
            column = sample(here, self._count)
            about = TensorId(self._step, module, kind, call, dtype_name(tensor.dtype), size)
            scale: LossScale = "none" if kind == "output" else "in"
            samples.looked.append(Sampled(number, about, column.numel(), scale, callers))
            samples.columns.append(column.to(torch.float32, copy=True))
        return number

    def add_input(self, tensor: torch.Tensor) -> int:
        """Record the extremes of a module's input; returns its index, as ``add`` does."""
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
        """Add float32 samples of parameters on one device; the samples must not change afterwards.

        Args:
            kind: "grad", "weight" or "update".
            params: the parameters.
            column: the concatenated samples.
            scale: see ``Sampled``.
            whole: True to find the extremes of the whole tensors.
        """
        samples = self._samples[column.device]
        samples.columns.append(column)
        for name, dtype, tensor in params:
            here = local(tensor)
            about = TensorId(self._step, name, kind, 0, dtype_name(dtype), here.numel())
            if whole and about.numel > self._count:
                samples.places[self._next] = _look(samples, here.detach())
            if about.numel:
                samples.looked.append(Sampled(self._next, about, samples_in(here, self._count), scale, ()))
            self._next += 1

    @torch.no_grad()
    def finish(self, scale: torch.Tensor | None, skipped: torch.Tensor | None) -> None:
        """Count all samples, without waiting for a device.

        Args:
            scale: the 0-dim loss scale; None if the loss was not scaled.
            skipped: a 0-dim tensor that is nonzero if the optimizer skipped the step, so that there are no updates.
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
        """True if ``rows`` returns without waiting."""
        sent = chain([self._flags], (ends for _, ends in self._ends), (block.read for block in self._blocks))
        return all(each.ready for each in sent)

    def rows(self) -> list[Row]:
        """Make the rows, in order of execution. They take more memory than their numbers, so make them on demand."""
        scale, skipped = map(float, self._flags.get())
        whole: dict[int, float] = {}
        for samples, ends in self._ends:
            largest = ends.get()[0].abs().amax(1).tolist()
            whole.update((number, largest[place]) for number, place in samples.places.items())
        found = [each for block in self._blocks for each in block.rows(scale, whole)]
        found = [each for each in found if not (skipped and each[0].about.tensor == "update")]
        found.sort(key=lambda each: each[0].number)
        bad = {looked.number for looked, row in found if not row.is_finite}
        if bad:
            bad |= self._bad_inputs()
            found = [(each, row if row.is_finite else replace(row, began_in=_origin(each, bad))) for each, row in found]
        return merge_rows(row for _, row in found)

    def _bad_inputs(self) -> set[int]:
        """Return the indices of inputs with inf or NaN, except intended ones: masks of 0 and -inf."""
        found = ((each, sent.get()[0].tolist()) for each, sent in self._ends)
        ends = {number: pairs[each.places[number]] for each, pairs in found for number in each.inputs}
        return {n for n, pair in ends.items() if not all(map(math.isfinite, pair)) and pair != [-math.inf, 0.0]}


class _Block(NamedTuple):
    """The statistics of tensors on one device, one line per tensor, while they are copied to the host."""

    looked: list[Sampled]
    width: int
    read: Reading

    def rows(self, scale: float, whole: dict[int, float]) -> Iterator[tuple[Sampled, Row]]:
        """Make the rows; ``whole`` has the largest magnitudes of whole tensors by index."""
        numbers, probes, counts = self.read.get()
        histograms = _histograms(counts.view(len(self.looked), _KINDS))
        lines = zip(self.looked, numbers.T.tolist(), histograms, probes.tolist(), strict=True)
        for looked, (amax, norm), kinds, probe in lines:
            size, divisor = looked.sampled, scale if looked.scale == "in" else 1.0
            amax = whole.get(looked.number, amax)
            zeros, infinite, nan = (kinds.pop(kind, 0) for kind in (_ZERO, _INF, _NAN))
            numel, shift = looked.about.numel, _BIAS + round(math.log2(divisor))
            yield (
                looked,
                Row(
                    *looked.about,
                    amax=amax / divisor,
                    rms=norm / math.sqrt(size) / divisor,
                    zeros=(zeros - (self.width - size)) / size,
                    overflow=max(infinite / size, math.isinf(amax) / numel),  # the sample may have missed it
                    nan=max(nan / size, math.isnan(amax) / numel),
                    exponents={kind - shift: count for kind, count in kinds.items()},
                    scale=1.0 if looked.scale == "none" else scale,
                    probe=tuple(value / divisor for value in probe[: min(size, PROBE)]),
                ),
            )


def _origin(looked: Sampled, bad: set[int]) -> str:
    """Name the innermost running module that got only finite inputs."""
    names = (name for name, inputs in looked.callers if bad.isdisjoint(inputs))
    is_whole = bool(looked.callers) and looked.callers[-1][0] == ROOT
    return next(names, OUTSIDE if is_whole else "")


@functools.lru_cache(4)  # equal for all sampled steps
def _places(sampled: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the indices of samples and probes in a column of all samples followed by one zero.

    There is one line per tensor. Lines of samples are padded to equal length with the index of the zero.
    """
    sizes = torch.tensor(sampled, dtype=torch.int64, device="cpu").to(device, non_blocking=True)[:, None]
    starts = sizes.cumsum(0) - sizes
    place = torch.arange(max((PROBE, *sampled)), dtype=torch.int64, device=device)
    probes = (place[:PROBE] * (sizes // sizes.clamp(max=PROBE))).minimum(sizes - 1)
    return (starts + place).masked_fill_(place >= sizes, sum(sampled)), starts + probes


def _counted(looked: list[Sampled], numbers: torch.Tensor, probes: torch.Tensor) -> _Block:
    """Count the values of tensors by bin, one line per tensor."""
    lines, width = numbers.shape
    bits = numbers.view(torch.int32) & _MAGNITUDE
    kinds = (bits >> 23) + bits.clamp(max=1) + (bits - _INFINITY).clamp_(0, 1)
    kinds += torch.arange(0, lines * _KINDS, _KINDS, dtype=torch.int32, device=bits.device)[:, None]
    if bits.device.type == "cpu":  # on other devices bincount waits for the maximum
        counts = torch.bincount(kinds.flatten(), minlength=lines * _KINDS)
    else:
        counts = torch.zeros(lines * _KINDS, dtype=torch.int32, device=bits.device)
        counts.scatter_add_(0, kinds.flatten().long(), counts.new_ones(1).expand(kinds.numel()))
    amax = bits.amax(1).view(torch.float32)
    finite = bits.view(torch.float32).nan_to_num_(0.0, 0.0)
    norms = torch.linalg.vector_norm(finite, dim=1, dtype=scalar_dtype(bits.device)).float()
    counts = counts.to(torch.int16 if width < 2**15 else torch.int32)
    return _Block(looked, width, Reading(torch.stack([amax, norms]), probes, counts).send())


def _look(samples: _Samples, here: torch.Tensor) -> int:
    """Find the extremes of a tensor; returns their index in ``samples.extremes``."""
    if not here.is_contiguous():  # torch would copy it; permuted by stride it mostly is contiguous
        here = here.permute(sorted(range(here.dim()), key=here.stride().__getitem__, reverse=True))
    samples.extremes.append(here.aminmax())
    return len(samples.extremes) - 1


def can_survey(tensor: Any) -> TypeGuard[torch.Tensor]:
    """True for a real, dense, nonempty floating tensor of at least 16 bits, whose values can be counted."""
    return isinstance(tensor, torch.Tensor) and tensor.dtype in _DTYPES and tensor.numel() > 0 and can_sample(tensor)


def _histograms(counts: torch.Tensor) -> list[dict[int, int]]:
    """Return the nonzero counts of each line by bin."""
    found: list[dict[int, int]] = [{} for _ in counts]
    for (line, kind), count in zip(counts.nonzero().tolist(), counts[counts != 0].tolist(), strict=True):
        found[line][kind] = count
    return found
