"""Classes of ``torch.autograd.Function`` whose inputs are cast where ops meet. Their own casts need native autocast."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from ..core.dtypes import HALF_DTYPES
from .containers import map_tensors
from .current import thread
from .dispatch import note_meeting

__all__ = ["met_in_cast_inputs", "met_in_fp32"]


def met_in_fp32(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor for a function that has no gradient in 16 bits, cast where ops meet in this thread."""
    if not _meets() or tensor.dtype not in HALF_DTYPES:
        return tensor
    note_meeting()
    return tensor.float()


def _meets() -> bool:
    """Whether ops meet in this thread."""
    return thread.current is not None and thread.current.call_again is not None


def met_in_cast_inputs(own: Any) -> Any:
    """``torch.autograd.Function.apply``, for functions with ``torch.amp.custom_fwd(cast_inputs=)`` where ops meet.

    ``custom_fwd`` asks whether native autocast is on, and at O2 it is not.
    """

    @functools.wraps(own.__func__)
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if _meets() and getattr(cls.forward, "__code__", None) is _CUSTOM_FWD.__code__:
            details = inspect.getclosurevars(cls.forward).nonlocals
            dtype, device = details.get("cast_inputs"), details["device_type"]
            if dtype is not None and not torch.is_autocast_enabled(device):
                note_meeting()
                args = map_tensors(
                    lambda t: t.to(dtype) if t.dtype in _MEETING and t.device.type == device else t, args
                )
        return own.__func__(cls, *args, **kwargs)

    return classmethod(apply)


_CUSTOM_FWD: Any = torch.amp.custom_fwd(lambda ctx: None, device_type="cpu")
_MEETING = (*HALF_DTYPES, torch.float32)
