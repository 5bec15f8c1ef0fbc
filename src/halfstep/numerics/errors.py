"""The error of a tensor, measured by a sample, and the part of it that is added and not inherited."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from .comparison import LIMIT, Entry

__all__ = ["Error", "entry_of", "error_of"]

_FEW = 2.0**-7
"""A share of lost values that is nothing yet: the unit of their excess."""


class Error(NamedTuple):
    """How a tensor differs from what it should be, relatively.

    Attributes:
        error: the L2 norm of the difference. In gradients, of the values that are 0 in neither: where one of them is 0,
            a ReLU or a maximum has decided otherwise, or a value was lost.
        lost: in gradients, the share of values that are 0 and should not be.
        whole: the L2 norm of the difference of all values, and at least ``lost``: what is handed on.
    """

    error: float = 0.0
    lost: float = 0.0
    whole: float = 0.0

    @classmethod
    def largest(cls, found: Iterable[Error]) -> Error:
        """The largest of each."""
        return cls(*(max(values) for values in zip(cls(), *found, strict=True)))


def error_of(
    values: torch.Tensor,
    right: torch.Tensor,
    amax: float,
    right_amax: float,
    *,
    norm: float = 0.0,
    gradient: bool = False,
) -> Error:
    """The error of a tensor.

    Args:
        values: a sample of it.
        right: what that should be.
        amax: the largest magnitude of the whole tensor.
        right_amax: what that should be.
        norm: the error is measured against this root mean square where it is larger.
        gradient: whether it is a gradient.
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


def entry_of(
    found: Error, inherited: Error, roundoff: float, *, least: float = 0.0, why: str = "", **where: Any
) -> Entry:
    """An entry from its errors.

    Args:
        found: the error of the tensor.
        inherited: the largest error of what went in.
        roundoff: the unit roundoff of the dtype that the op should compute in.
        least: an excess that is known for another reason.
        why: the reason of that, or of an error.
        **where: the other attributes.
    """
    added = 0.0 if math.isinf(inherited.whole) else max(0.0, found.error - inherited.whole)
    more = 0.0 if math.isinf(inherited.lost) else max(0.0, found.lost - inherited.lost)
    by_error = added / (roundoff + inherited.whole) if added else 0.0
    by_loss = more / (_FEW + inherited.lost) if more else 0.0
    excess = max(least, by_error, by_loss)
    if math.isinf(excess):
        why = "overflow"
    elif excess <= LIMIT:
        why = ""
    elif by_loss == excess:
        why = "underflow"
    return Entry(
        error=max(found.error, found.lost),
        inherited=max(inherited.whole, inherited.lost),
        added=max(added, more),
        excess=excess,
        why=why or ("cancellation" if excess > LIMIT else ""),
        **where,
    )
