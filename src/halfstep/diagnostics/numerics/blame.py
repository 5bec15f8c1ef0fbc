"""The error that each row of a run adds, from two aligned lists of rows."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import torch

from ...core.dtypes import HALF_DTYPES, dtype_name
from ..observe.ops import USER
from ..observe.row import Row
from ..observe.samples import PROOF, grid_flags, is_on_grid
from .comparison import LIMIT, Entry
from .linked_rows import LinkedRow, aligned_rows

__all__ = ["entries_of", "first_not_finite"]

_WIDE = torch.float32

_FEW = 2.0**-7
"""The share of lost values that is still negligible: the unit of their excess."""

_MANY = 0.1
"""The share of subnormal values above which they explain an error."""


class Error(NamedTuple):
    """The relative differences between a tensor and its reference.

    Attributes:
        error: the L2 norm of the difference. In gradients, only of values that are 0 in neither tensor: if one value is
            0, a ReLU or a maximum decided differently, or the value was lost.
        lost: in gradients, the share of values that are 0 and should not be.
        whole: the L2 norm of the difference of all values, and at least ``lost``: the error that later rows inherit.
    """

    error: float = 0.0
    lost: float = 0.0
    whole: float = 0.0

    @classmethod
    def largest(cls, found: Iterable[Error]) -> Error:
        """Take the maximum of each field."""
        return cls(*(max(values) for values in zip(cls(), *found, strict=True)))


def entries_of(
    candidate: Sequence[LinkedRow], reference: Sequence[LinkedRow], scale: float = 1.0
) -> tuple[list[Entry], int]:
    """Compute the errors that the rows of a candidate add, in order of execution, and the number of unmatched rows.

    Args:
        candidate: the rows of the candidate.
        reference: the rows of the same step or steps in a wide dtype.
        scale: the loss scale of the candidate; the reference has none.
    """
    matched, alone = aligned_rows(candidate, reference)
    sizes = _largest_rms(reference)
    errors: list[Error] = []
    entries: list[Entry] = []
    occurrences: Counter[tuple[str, str, bool]] = Counter()
    for i, row in enumerate(candidate):
        inherited = Error.largest(errors[j] for j in row.inputs)
        # inputs from the forward pass decide which gradients of a backward op are 0
        decided = max((errors[j].whole for j in row.inputs if not (candidate[j].backward or row.saved)), default=0.0)
        if row.passes_on:  # measured separately; passes its inherited error on
            amax = sum(candidate[j].amax for j in row.inputs)
            found = Error() if row.source is None else _error(row, row.source, amax)
            errors.append(Error(0.0, max(inherited.lost, found.lost), inherited.whole + found.whole))
            inherited, decided = Error(), 0.0
        elif i not in matched or (row.index and not row.backward and not row.saved):
            errors.append(inherited)  # unknown, or statistics next to the result
            continue
        else:
            right, factor = reference[matched[i]], scale if row.scaled else 1.0
            norm = sizes[_family(row)] * factor if row.leaf else 0.0
            if row.saved is not None and right.saved is not None:
                found = _error_of_saved(row, right, row.saved, right.saved, norm)
                errors.append(Error.largest((inherited, found)))
            else:
                noise = _summed(right, reference) if row.leaf and row.backward else 0.0
                found = _error_of_op(row, right, factor, max(norm, noise * factor))
                errors.append(found)
        if row.passes_on and row.source is None:
            continue
        known, why = (0.0, "") if row.saved else _known(row, candidate)
        key = (row.module, row.op, row.backward)
        inherited = inherited._replace(lost=inherited.lost + decided)
        entries.append(_entry(row, row.index if row.saved else occurrences[key], found, inherited, known, why))
        occurrences[key] += 1
    return entries, alone


def _entry(row: LinkedRow, occurrence: int, found: Error, inherited: Error, known: float, why: str) -> Entry:
    """Make the entry of a row from its errors and an excess that is known for another reason."""
    added = 0.0 if math.isinf(inherited.whole) else max(0.0, found.error - inherited.whole)
    more = 0.0 if math.isinf(inherited.lost) else max(0.0, found.lost - inherited.lost)
    roundoff = getattr(row.emulates, "roundoff", 0.0) or _roundoff(_WIDE if row.wide else row.dtype)
    by_error = added / (roundoff + inherited.whole) if added else 0.0
    by_loss = more / (_FEW + inherited.lost) if more else 0.0
    excess = max(known, by_error, by_loss)
    if math.isinf(excess):
        why = "overflow"
    elif excess <= LIMIT:
        why = ""
    elif by_loss == excess:
        why = "underflow"
    return Entry(
        row.module,
        row.op,
        occurrence,
        row.backward,
        getattr(row.emulates, "name", dtype_name(row.dtype) + " (emulated)" * (row.emulates is row.dtype)),
        error=max(found.error, found.lost),
        inherited=max(inherited.whole, inherited.lost),
        added=max(added, more),
        excess=excess,
        why=why or ("cancellation" if excess > LIMIT else ""),
        step=0 if row.saved is None else row.saved.step,
    )


_FILLS = ("masked_fill", "masked_fill_", "full", "fill_", "where", "triu")
"""Ops that write an inf on purpose, such as the one of a mask."""


def first_not_finite(rows: Sequence[LinkedRow]) -> str:
    """Name the op that made a run inf or NaN, such as "NaN, from 1.norm: rsqrt"; "" if loss and gradients are finite.

    The search goes back from the first NaN gradient or loss, or without one from the first inf, to the first op that
    had finite inputs. An inf that was filled in, such as the inf of a mask, is not reported, but the NaN made from it.
    """
    bad = [not math.isfinite(row.amax) for row in rows]
    losses = [i for i, row in enumerate(rows) if not (row.backward or row.passes_on)][-1:]
    ends = [i for i in [*(i for i, row in enumerate(rows) if row.leaf), *losses] if bad[i]]
    if not ends:
        return ""
    nan = [i for i, row in enumerate(rows) if math.isnan(row.amax)]
    at = origin = nan[0] if nan else ends[0]  # the first NaN has no NaN in its inputs
    while before := [i for i in rows[origin].inputs if bad[i] and i < origin]:
        origin = before[0]
    row = rows[at if rows[origin].op in _FILLS else origin]
    return f"{'NaN' if nan else 'inf'}, from {row.module}: {row.op}{' (backward)' if row.backward else ''}"


# ---- errors


def _is_subnormal(row: LinkedRow) -> bool:
    """True if many values are subnormal, so that they have less precision."""
    sizes = row.sample[row.sample != 0].abs()
    return len(sizes) > 0 and float((sizes < torch.finfo(row.dtype).smallest_normal).float().mean()) > _MANY


def _error(row: LinkedRow, right: torch.Tensor, right_amax: float, norm: float = 0.0) -> Error:
    return error_of(row.sample, right, row.amax, right_amax, norm=norm, gradient=row.backward)


def _error_of_op(row: LinkedRow, right: LinkedRow, factor: float, norm: float) -> Error:
    found = _error(row, right.sample * factor, right.amax, norm)
    return found._replace(whole=max(found.whole, _sketched(row.sketch, right.sketch * factor)))


def _error_of_saved(row: LinkedRow, right: LinkedRow, saved: Row, other: Row, norm: float) -> Error:
    """Compute the error of the values that saved rows keep; if their positions differ, of magnitudes."""
    if row.shape == right.shape and row.sample.shape == right.sample.shape and row.sample.numel():
        found = _error(row, right.sample, right.amax, norm)
    else:
        pairs = ((saved.rms, other.rms), (saved.amax, other.amax))
        columns = (torch.tensor(pair, dtype=torch.float64, device="cpu").reshape(2, 1) for pair in pairs)
        found = Error.largest(error_of(a, b, row.amax, right.amax, norm=norm) for a, b in columns)
    lost = 0.0
    if row.backward and other.zeros < 1.0 and row.shape == right.shape:  # counted in more values than rows keep
        lost = max(0.0, saved.zeros - other.zeros) / (1.0 - other.zeros)
    return found._replace(lost=lost, whole=max(found.whole, lost))


def error_of(
    values: torch.Tensor,
    right: torch.Tensor,
    amax: float,
    right_amax: float,
    *,
    norm: float = 0.0,
    gradient: bool = False,
) -> Error:
    """Compute the error of a tensor.

    Args:
        values: a sample of the tensor.
        right: the same sample of the reference.
        amax: the largest magnitude of the whole tensor.
        right_amax: the largest magnitude of the whole reference.
        norm: a root mean square to divide the error by, if it is larger than the sample's.
        gradient: True for a gradient.
    """
    if not (math.isfinite(amax) and math.isfinite(right_amax)):
        overflow = math.inf if math.isfinite(right_amax) else 0.0
        return Error(overflow, 0.0, overflow)
    values, right = values.double(), right.double()
    whole = _relative(values, right, norm)
    if not gradient:
        return Error(whole, 0.0, whole)
    there = right != 0
    both = there & (values != 0)
    lost = 1.0 - float(both.sum()) / float(there.sum()) if bool(there.any()) else 0.0
    return Error(_relative(values[both], right[both], norm), lost, max(whole, lost))


def _relative(values: torch.Tensor, right: torch.Tensor, norm: float) -> float:
    size = max(float(right.norm()), norm * math.sqrt(right.numel()))
    difference = float((values - right).norm())
    return difference / size if size else float(difference > 0)


def _sketched(sketch: torch.Tensor, right: torch.Tensor) -> float:
    """Compute the relative error of a whole tensor from its sketch; a sample may miss a few diverging values."""
    if not len(sketch) or not bool(sketch.isfinite().all() & right.isfinite().all()) or not right[0]:
        return 0.0
    return float((sketch[1:].double() - right[1:].double()).norm() / right[0])


def _largest_rms(reference: Sequence[LinkedRow]) -> dict[Hashable, float]:
    """Find the largest root mean square among the parameters of a module, or among their gradients.

    A single parameter is no measure: the gradient of a bias before a norm is 0 except for roundoff.
    """
    found: dict[Hashable, float] = defaultdict(float)
    for row in reference:
        if row.leaf and math.isfinite(row.amax):
            found[_family(row)] = max(found[_family(row)], row.saved.rms if row.saved else _rms(row))
    return found


def _rms(row: LinkedRow) -> float:
    return float(row.sample.double().square().mean().sqrt())


def _summed(row: LinkedRow, rows: Sequence[LinkedRow]) -> float:
    """Compute the size that a sum of gradients has if their signs are random; a smaller sum is exact only to this.

    The gradients of a LayerNorm before a BatchNorm, which takes out mean and scale, are sums that are 0 but for
    roundoff.
    """
    parts = [rows[i] for i in row.inputs if rows[i].backward and len(row.shape) == 1 and math.isfinite(rows[i].amax)]
    return max((_rms(each) * math.sqrt(each.shape.numel() / row.shape.numel()) for each in parts), default=0.0)


def _family(row: LinkedRow) -> Hashable:
    """Return the key that a module's parameters, or their gradients, share: kind and step are added if known."""
    return row.module, *((row.saved.step, row.saved.tensor) if row.saved else ())


# ---- roundoff that no error shows


def _roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def _known(row: LinkedRow, candidate: Sequence[LinkedRow]) -> tuple[float, str]:
    """Return an excess that is known regardless of the errors, with its cause; or 0 and the cause of an error."""
    wide, dtype = _roundoff(_WIDE), None
    if row.wide and row.dtype in HALF_DTYPES:
        return _roundoff(row.dtype) / wide, "fp32 op in 16 bits"
    if row.dtype is _WIDE and row.cast is not None:
        dtype = _rounded_by_user(row, candidate)
    elif row.dtype is _WIDE and row.inputs and not row.passes_on and _is_on_grid(row.sample):
        dtype = torch.bfloat16 if all(_is_off_grid(candidate[j]) for j in row.inputs) else None
    if dtype is not None:
        return _roundoff(dtype) / wide, "fp32 in name only"
    return 0.0, "underflow" if _is_subnormal(row) else ""


def _rounded_by_user(row: LinkedRow, candidate: Sequence[LinkedRow]) -> torch.dtype | None:
    """Return the dtype to which user code cast fp32 values that are cast back here, with no op in between."""
    at = row.inputs
    while at and candidate[at[0]].passes_on:
        before = candidate[at[0]]
        if before.cast is not None:
            rounded = before.cast.made_by == USER and before.inputs and _is_off_grid(candidate[before.inputs[0]])
            return before.dtype if rounded and before.cast.source is _WIDE else None
        at = before.inputs
    return None


def _is_off_grid(row: LinkedRow) -> bool:
    return row.dtype is _WIDE and row.sample.numel() >= PROOF and bool(grid_flags(row.sample)[0])


def _is_on_grid(sample: torch.Tensor) -> bool:
    return sample.numel() >= PROOF and is_on_grid(grid_flags(sample).tolist())
