"""Our methods in the place of an optimizer instance's own, and back again."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["replace_method"]


def replace_method(optimizer: torch.optim.Optimizer, name: str, method: Callable[..., Any]) -> Callable[[], None]:
    """Put ``method`` in the place of the instance's ``name``, keeping the marks that lr schedulers leave on it.

    Returns:
        A function that puts back what was there, unless something else has taken the place since.
    """
    before = vars(optimizer).get(name)
    own = getattr(optimizer, name, method)

    @functools.wraps(getattr(own, "__func__", own))
    def replacement(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    def undo() -> None:
        if vars(optimizer).get(name) is not bound:
            return
        if before is None:
            delattr(optimizer, name)
        else:
            setattr(optimizer, name, before)

    # A bound method, because torch's schedulers bind what they find again.
    bound = types.MethodType(replacement, optimizer)
    setattr(optimizer, name, bound)
    return undo
