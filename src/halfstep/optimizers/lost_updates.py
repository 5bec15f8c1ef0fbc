"""The warning that an optimizer updates 16-bit weights by less than they can hold."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch

from ..core.callers import callers_level
from ..core.dtypes import HALF_DTYPES, dtype_name

__all__ = ["warn_of_lost_updates"]


def warn_of_lost_updates(optimizer: str, groups: Iterable[dict[str, Any]]) -> None:
    """Warn where a learning rate changes 16-bit weights by less than half of their last bit.

    Args:
        optimizer: the name of its class.
        groups: its parameter groups; the first of which this is true is told.
    """
    for group in groups:
        lr = group["lr"]
        halves = {p.dtype for p in group["params"] if p.dtype in HALF_DTYPES}
        if isinstance(lr, torch.Tensor) or not halves:
            continue
        dtype = max(halves, key=lambda d: torch.finfo(d).eps)
        half_ulp = torch.finfo(dtype).eps / 4  # of a weight just below a power of two
        decay = lr * group.get("weight_decay", 0.0)
        small = {name: x for name, x in (("lr", lr), ("lr * weight_decay", decay)) if 0 < x < half_ulp}
        if small:
            given = " and ".join(f"{name} = {x:g}" for name, x in small.items())
            warnings.warn(
                f"{optimizer} updates {dtype_name(dtype)} weights in place with {given}: a relative change below "
                f"{half_ulp:g} rounds away. Pass master_weights=True to keep it, or rounding='stochastic' for "
                "bfloat16.",
                UserWarning,
                stacklevel=callers_level(),
            )
            return
