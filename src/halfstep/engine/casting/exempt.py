"""Models that the process-wide op casting leaves alone."""

from __future__ import annotations

import sys
from typing import Any, TypeVar

import torch
from torch import nn

from ...core.errors import ArgumentTypeError
from . import ops
from .compiled import not_by_itself

__all__ = ["exempt"]

M = TypeVar("M", bound=nn.Module)


_NOTHING = ops.OpCasting(None, enabled=False)


class _Exemption:
    """Two forward hooks: while the model runs nothing is cast."""

    @not_by_itself
    def enter(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            ops.enter_traced_model(_NOTHING, explicit=True)
        else:
            ops.enter_model(_NOTHING, self, sys._getframe(1), explicit=True)

    @not_by_itself
    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            ops.leave_traced_model()
        else:
            ops.leave_model(self)


def exempt(model: M) -> M:
    """Leave a model as it is while O1 is on in the process: its forward passes run without op casting.

    ::

        student, optimizer = amp.initialize(student, optimizer, opt_level="O1")
        teacher = amp.exempt(teacher)  # computes as if there were no amp

    What it computes outside of ``forward`` (a loss, say) is cast like everything else; ``amp.disable_casts`` is a block
    without it.

    Args:
        model: any module; calling this twice is calling it once.

    Returns:
        The model.

    Raises:
        ArgumentTypeError: for something else than a module.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"amp.exempt takes a torch.nn.Module, not {type(model).__name__}.")
    known = [getattr(hook, "__self__", None) for hook in model._forward_pre_hooks.values()]
    if not any(isinstance(owner, _Exemption) for owner in known):
        exemption = _Exemption()
        model.register_forward_pre_hook(exemption.enter)
        model.register_forward_hook(exemption.leave, always_call=True)
    return model
