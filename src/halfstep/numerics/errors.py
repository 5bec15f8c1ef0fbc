"""The error of a tensor, measured by a sample."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

__all__ = ["Error", "error_of"]


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
