"""What of torch must know about op casting while any is on: the backward pass, and activation checkpoints.

Two functions of ``torch.autograd`` and two names in ``torch.utils.checkpoint`` (as of torch 2.11 to 2.13) are wrapped
while at least one casting is in force in the process, and put back after the last.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint as checkpoint

__all__ = ["hold", "release"]

_lock = threading.Lock()
_held = 0
_own: dict[tuple[Any, str], Any] = {}

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def hold(uncast: Wrap, remember: Wrap) -> None:
    """Count one more casting; the first puts the wrappers in place.

    Args:
        uncast: makes a function run without casts.
        remember: makes a function run, whenever it is called, under the casting that is in force now.
    """
    global _held
    with _lock:
        _held += 1
        if _held > 1:
            return
        for name in ("backward", "grad"):
            _replace(torch.autograd, name, uncast(getattr(torch.autograd, name)))
        if hasattr(checkpoint, "_checkpoint_without_reentrant_generator"):
            generator = checkpoint._checkpoint_without_reentrant_generator

            @functools.wraps(generator)
            def remembering(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
                return generator(remember(fn), *args, **kwargs)

            _replace(checkpoint, "_checkpoint_without_reentrant_generator", remembering)
        if hasattr(checkpoint, "CheckpointFunction"):
            own = checkpoint.CheckpointFunction

            class CheckpointFunction(own):  # type: ignore[misc, valid-type]
                """Hands the original a function that remembers its casting."""

                @staticmethod
                def apply(fn: Callable[..., Any], *args: Any) -> Any:
                    return own.apply(remember(fn), *args)

            _replace(checkpoint, "CheckpointFunction", CheckpointFunction)


def release() -> None:
    """Count one casting less; the last puts torch's own functions back."""
    global _held
    with _lock:
        _held -= 1
        if _held:
            return
        for (owner, name), own in _own.items():
            setattr(owner, name, own)
        _own.clear()


def _replace(owner: Any, name: str, wrapper: Any) -> None:
    _own[owner, name] = getattr(owner, name)
    setattr(owner, name, wrapper)
