"""``binary_cross_entropy`` of a 16-bit sigmoid is computed in fp32 from what the sigmoid was given.

In 16 bits a sigmoid is 1 from about 6 (bfloat16) or 8 (float16) on, where the logarithm and the gradient of the loss
are infinite. The number before the sigmoid still has all digits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F

from ..core.dtypes import HALF_DTYPES
from .containers import map_tensors
from .dispatch import CastMode, Rule, note_meeting
from .operands import version_of
from .rules import without_native

__all__ = ["from_logits", "remember_logits"]

_MOST = 4
"""The number of latest sigmoids that a thread remembers: each keeps its argument until it is freed."""


def remember_logits(mode: CastMode, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A sigmoid, whose 16-bit argument ``from_logits`` may ask for."""
    result = func(*args, **kwargs)
    if result.dtype in HALF_DTYPES:
        given = args[0] if args else kwargs["input"]
        known, key = mode.logits, id(result)
        reference = weakref.ref(result, lambda _: known.pop(key, None))
        known[key] = (reference, given, version_of(result), version_of(given))
        if len(known) > _MOST:
            del known[next(iter(known))]
    return result


def from_logits(otherwise: Rule, mode: CastMode, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """``F.binary_cross_entropy`` of a sigmoid, unless either was written to meanwhile. The gradient passes by it."""
    first = args[0] if args else kwargs["input"]
    _, logits, *versions = mode.logits.get(id(first), (None, None))
    if logits is None or versions != [version_of(first), version_of(logits)] or not mode.casts(first):
        return otherwise(mode, func, args, kwargs)
    note_meeting()
    rest = args[1:], {key: a for key, a in kwargs.items() if key != "input"}
    rest, kwargs = map_tensors(lambda tensor: tensor.float() if tensor.dtype in HALF_DTYPES else tensor, rest)
    return without_native(mode, F.binary_cross_entropy_with_logits, (logits.float(), *rest), kwargs)
