"""``binary_cross_entropy`` of a 16-bit sigmoid, which is computed in fp32 from the logits, the sigmoid's input.

A 16-bit sigmoid rounds to 1 for inputs above about 6 (bfloat16) or 8 (float16), which makes the logarithm and the
gradient of the loss infinite. The logits have not lost that information.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ..core.dtypes import HALF_DTYPES
from .containers import map_tensors
from .dispatch import CastMode, Rule, count_changed_op
from .operands import version_of
from .rules import without_native

__all__ = ["from_logits", "remember_logits"]

_MOST = 4
"""The number of recent sigmoids that a thread remembers; each keeps its input alive until its result is freed."""


def remember_logits(mode: CastMode, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute a sigmoid, and remember its 16-bit input for ``from_logits``."""
    result = func(*args, **kwargs)
    if result.dtype in HALF_DTYPES:
        given = args[0] if args else kwargs["input"]
        mode.logits[result] = (given, version_of(result), version_of(given))
        if len(mode.logits) > _MOST:
            del mode.logits[next(iter(mode.logits))]
    return result


def from_logits(otherwise: Rule, mode: CastMode, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute the loss of a sigmoid from its logits, which get the gradient, unless either was written to since."""
    first = args[0] if args else kwargs["input"]
    logits, *versions = mode.logits.get(first, (None,)) if isinstance(first, Tensor) else (None,)
    if logits is None or versions != [version_of(first), version_of(logits)] or not mode.casts(first):
        return otherwise(mode, func, args, kwargs)
    count_changed_op()
    rest = args[1:], {key: a for key, a in kwargs.items() if key != "input"}
    rest, kwargs = map_tensors(lambda tensor: tensor.float() if tensor.dtype in HALF_DTYPES else tensor, rest)
    return without_native(mode, F.binary_cross_entropy_with_logits, (logits.float(), *rest), kwargs)
