"""Which op adds how much to the error of a step: two lists of records, aligned and compared."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from difflib import SequenceMatcher
from typing import Any

import torch

from ..core.dtypes import HALF_DTYPES, dtype_name
from ..observe.ops import USER
from ..observe.samples import grid_flags
from .comparison import Entry
from .errors import Error, entry_of, error_of
from .recording import Record

__all__ = ["entries_of", "first_not_finite"]

_WIDE = torch.float32
_PROOF = 64
"""With fewer values on the grid of a 16-bit format nothing is proved."""

_MANY = 0.1
"""The share of subnormal values above which they are the reason of an error."""


def entries_of(candidate: Sequence[Record], reference: Sequence[Record], scale: float) -> tuple[list[Entry], int]:
    """The errors that the ops of a candidate add, in order of execution, and the number of ops that only one run has.

    Args:
        candidate: its records.
        reference: those of the same step in a wide dtype.
        scale: the loss scale that the candidate has and the reference has not.
    """
    matched, unmatched = _matches(candidate, reference)
    gradients = _gradient_norms(reference)
    errors: list[Error] = []
    entries: list[Entry] = []
    occurrences: Counter[tuple[str, str, bool]] = Counter()
    for i, record in enumerate(candidate):
        inherited = Error.largest(errors[j] for j in record.inputs)
        # what a backward op has from the forward pass decides which gradients are 0
        decided = max((errors[j].whole for j in record.inputs if not candidate[j].backward), default=0.0)
        other = reference[matched[i]] if i in matched else None
        if record.passes_on:  # measured by itself, and hands on what it gets
            amax = sum(candidate[j].amax for j in record.inputs)
            found = Error() if record.source is None else _error(record, record.source, amax)
            errors.append(Error(0.0, max(inherited.lost, found.lost), inherited.whole + found.whole))
            inherited, decided = Error(), 0.0
        elif other is None or (record.index and not record.backward):  # unknown, or statistics beside the result
            errors.append(inherited)
            continue
        else:
            factor = scale if record.scaled else 1.0
            norm = gradients.get(record.module, 0.0) * factor if record.leaf else 0.0
            found = _error(record, other.sample * factor, other.amax, norm)
            errors.append(found._replace(whole=max(found.whole, _sketched(record.sketch, other.sketch * factor))))
        if record.passes_on and record.source is None:
            continue
        known, why = _known(record, candidate)
        key = (record.module, record.op, record.backward)
        entries.append(
            entry_of(
                found,
                inherited._replace(lost=inherited.lost + decided),
                _roundoff(_WIDE if record.wide else record.dtype),
                least=known,
                why=why or ("underflow" if _is_subnormal(record) else ""),
                module=record.module,
                op=record.op,
                occurrence=occurrences[key],
                backward=record.backward,
                dtype=dtype_name(record.dtype),
            )
        )
        occurrences[key] += 1
    return entries, unmatched


def first_not_finite(records: Sequence[Record]) -> str:
    """The op that made a run inf or NaN, as in "NaN, from 1.norm: rsqrt"; "" if its loss and gradients are finite.

    Followed back from the first NaN, or without one from the first such gradient or loss, to the first op that had
    finite inputs. So an inf that a mask needs is no fault.
    """
    bad = [not math.isfinite(record.amax) for record in records]
    ends = [i for i, record in enumerate(records) if record.leaf]
    ends += [i for i, record in enumerate(records) if not (record.backward or record.passes_on)][-1:]
    ends = [i for i in ends if bad[i]]
    if not ends:
        return ""
    nan = [i for i, record in enumerate(records) if math.isnan(record.amax)]
    at = nan[0] if nan else ends[0]
    while before := [i for i in records[at].inputs if bad[i] and i < at]:
        at = before[0]
    record = records[at]
    return f"{'NaN' if nan else 'inf'}, from {record.module}: {record.op}{' (backward)' if record.backward else ''}"


# ---- alignment


def _aligned(a: Sequence[Hashable], b: Sequence[Hashable]) -> Iterator[tuple[int, int]]:
    """Which places in two sequences belong together."""
    if a == b:
        yield from ((i, i) for i in range(len(a)))
        return
    for at_a, at_b, size in SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks():
        yield from ((at_a + i, at_b + i) for i in range(size))


def _matches(candidate: Sequence[Record], reference: Sequence[Record]) -> tuple[dict[int, int], int]:
    """The place of each record of the candidate in the reference, and how many ops have none."""
    places: list[dict[Any, list[int]]] = []
    for records in (candidate, reference):
        found: dict[Any, list[int]] = defaultdict(list)
        for i, record in enumerate(records):
            if not record.passes_on:
                found[record.module, record.backward].append(i)
        places.append(found)
    matched: dict[int, int] = {}
    for where in places[0].keys() & places[1].keys():
        ours, theirs = places[0][where], places[1][where]
        keys = [
            [(r.op, r.index, r.shape) for r in map(records.__getitem__, at)]
            for records, at in ((candidate, ours), (reference, theirs))
        ]
        matched |= {ours[i]: theirs[j] for i, j in _aligned(*keys)}
    total = sum(len(at) for found in places for at in found.values())
    return matched, total - 2 * len(matched)


# ---- errors


def _is_subnormal(record: Record) -> bool:
    """Whether many values are so small that they have fewer digits."""
    sizes = record.sample[record.sample != 0].abs()
    return len(sizes) > 0 and float((sizes < torch.finfo(record.dtype).smallest_normal).float().mean()) > _MANY


def _error(record: Record, right: torch.Tensor, right_amax: float, norm: float = 0.0) -> Error:
    return error_of(record.sample, right, record.amax, right_amax, norm=norm, gradient=record.backward)


def _sketched(sketch: torch.Tensor, right: torch.Tensor) -> float:
    """The relative error of a whole tensor, by its sketch: a sample may miss a few values that went another way."""
    if not len(sketch) or not bool(sketch.isfinite().all() & right.isfinite().all()) or not right[0]:
        return 0.0
    return float((sketch[1:].double() - right[1:].double()).norm() / right[0])


def _gradient_norms(reference: Sequence[Record]) -> dict[str, float]:
    """The largest root mean square of the gradients of each module's parameters.

    The gradient of a bias before a norm is 0 but for roundoff, and is to be measured against that of the weight.
    """
    found: dict[str, float] = defaultdict(float)
    for record in reference:
        if record.leaf and math.isfinite(record.amax):
            found[record.module] = max(found[record.module], float(record.sample.double().square().mean().sqrt()))
    return found


# ---- roundoff that no error shows


def _roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def _known(record: Record, candidate: Sequence[Record]) -> tuple[float, str]:
    """An excess that is known whatever the errors are, and why."""
    wide = _roundoff(_WIDE)
    if record.wide and record.dtype in HALF_DTYPES:
        return _roundoff(record.dtype) / wide, "fp32 op in 16 bits"
    if record.dtype is not _WIDE or not record.inputs:
        return 0.0, ""
    if record.cast is not None:
        dtype = _rounded_by_user(record, candidate)
        return (0.0, "") if dtype is None else (_roundoff(dtype) / wide, "fp32 in name only")
    inputs = (candidate[j] for j in record.inputs)
    if not record.passes_on and _is_on_grid(record.sample) and all(map(_is_off_grid, inputs)):
        return _roundoff(torch.bfloat16) / wide, "fp32 in name only"
    return 0.0, ""


def _rounded_by_user(record: Record, candidate: Sequence[Record]) -> torch.dtype | None:
    """The dtype to which the script has cast fp32 values that are cast back here, with nothing in between."""
    at = record.inputs
    while at and candidate[at[0]].passes_on:
        before = candidate[at[0]]
        if before.cast is not None:
            rounded = before.cast.made_by == USER and before.inputs and _is_off_grid(candidate[before.inputs[0]])
            return before.dtype if rounded and before.cast.source is _WIDE else None
        at = before.inputs
    return None


def _is_off_grid(record: Record) -> bool:
    wide = record.dtype is _WIDE and record.sample.numel() >= _PROOF
    return wide and bool(grid_flags(record.sample)[0])


def _is_on_grid(sample: torch.Tensor) -> bool:
    off, used = grid_flags(sample).tolist() if sample.numel() >= _PROOF else (1.0, 0.0)
    return not off and bool(used)
