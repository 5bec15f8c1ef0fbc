"""Casts of the inputs of ``torch.autograd.Function``, for functions that op casting would break."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from ..core.dtypes import HALF_DTYPES
from ..torch_internals.torch_compat import Dirichlet
from .containers import map_tensors, tensors_in
from .current import Patches, thread
from .dispatch import count_changed_op
from .rules import CASTABLE

__all__ = ["with_inputs_cast"]


def with_inputs_cast(remember: Callable[[Any], Any], autograd_patches: Patches, own: Any) -> Any:
    """Make the replacement of ``torch.autograd.Function.apply``, which runs all functions with a custom gradient.

    - A reentrant checkpoint recomputes its function under the casting of the forward pass.
    - The concentration of a Dirichlet sample is cast to fp32, because its gradient has no 16-bit kernel.
    - ``torch.amp.custom_fwd(cast_inputs=)`` casts only under native autocast, which is off at O2, so it is done here.

    Args:
        remember: a function that binds a function to the current casting.
        autograd_patches: the replacements that retry refused ops in backward passes as well: the ``backward`` of a
            user's function may combine the fp32 result of an island with a 16-bit weight.
        own: torch's ``apply``.
    """

    @functools.wraps(own.__func__)
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        casting = thread.mode.config
        if cls is CheckpointFunction:
            args = (remember(args[0]), *args[1:])
        elif cls is Dirichlet and casting.retries and args[0].dtype in HALF_DTYPES:
            count_changed_op()
            args = (args[0].float(),)
        elif casting.retries and getattr(cls.forward, "__code__", None) is _CUSTOM_FWD.__code__:
            details = inspect.getclosurevars(cls.forward).nonlocals
            dtype, kind = details.get("cast_inputs"), details["device_type"]
            if dtype is not None and not torch.is_autocast_enabled(kind):
                count_changed_op()
                args = map_tensors(lambda t: t.to(dtype) if t.dtype in CASTABLE and t.device.type == kind else t, args)
        result = own.__func__(cls, *args, **kwargs)
        if casting.retries and not casting.by_call and not cls.__module__.startswith("torch."):
            autograd_patches.hold_while(casting)
            for node in {tensor.grad_fn for tensor in tensors_in(result)} - {None}:
                # User code may not keep the casting until the backward pass.
                node.metadata["halfstep"] = casting  # type: ignore[union-attr, index]
        return result

    return classmethod(apply)


_CUSTOM_FWD: Any = torch.amp.custom_fwd(lambda ctx: None, device_type="cpu")
