"""Models that the process-wide op casting leaves alone."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from torch import nn

from ...core.errors import ArgumentTypeError
from . import ops

__all__ = ["exempt"]

M = TypeVar("M", bound=nn.Module)


class _Exemption:
    """The scopes of the forward passes under way, by thread; copies and pickles begin without any."""

    def __init__(self) -> None:
        self._open: dict[int, list[AbstractContextManager[None]]] = {}

    def enter(self, module: nn.Module, args: Any) -> None:
        scope = ops.disable_casts()
        scope.__enter__()
        self._open.setdefault(threading.get_ident(), []).append(scope)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if scopes := self._open.get(threading.get_ident()):
            scopes.pop().__exit__(None, None, None)

    def __getstate__(self) -> dict[str, Any]:
        return {"_open": {}}


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
