"""What of torch must know about op casting while any is on: the backward pass, checkpoints, DataParallel.

Two functions of ``torch.autograd``, two names in ``torch.utils.checkpoint``, and the ``parallel_apply`` of
DataParallel, which runs replicas in threads of its own (as of torch 2.11 to 2.13), are wrapped while at least one
casting is in force in the process, and put back after the last. So is torch's setting that has ``torch.compile`` cast
in backward passes what it casts in forward.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.nn.parallel.data_parallel
import torch.utils.checkpoint as checkpoint
from torch.optim.optimizer import register_optimizer_step_post_hook

__all__ = ["hold", "release"]

_data_parallel = sys.modules["torch.nn.parallel.data_parallel"]  # torch.nn.parallel has a function of that name
_lock = threading.RLock()  # the garbage collector may end a session while this thread is in here
_held = 0
_hook: Any = None
_own: dict[tuple[Any, str], Any] = {}
_made: dict[tuple[Any, str, Any], Any] = {}  # the wrappers, for a class among them takes long to make

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def hold(uncast: Wrap, remember: Wrap, stepped: Callable[[], None]) -> None:
    """Count one more casting; the first puts the wrappers in place.

    Args:
        uncast: makes a function run without casts.
        remember: makes a function run, whenever it is called, under the casting that is in force now.
        stepped: called after every step of an optimizer: fused ones write to weights without a new version.
    """
    global _held, _hook
    with _lock:
        _held += 1
        if _held > 1:
            return
        _replace(torch.autograd, "backward", uncast)
        _replace(torch.autograd, "grad", uncast)
        _replace(checkpoint, "_checkpoint_without_reentrant_generator", lambda own: _generator(own, remember))
        _replace(checkpoint, "CheckpointFunction", lambda own: _function(own, remember))
        _replace(_data_parallel, "parallel_apply", lambda own: _parallel_apply(own, remember))
        _hook = register_optimizer_step_post_hook(lambda *_: stepped())
        compiling = import_module("torch._functorch.config")
        if hasattr(compiling, "backward_pass_autocast"):
            _own[compiling, "backward_pass_autocast"] = compiling.backward_pass_autocast
            compiling.backward_pass_autocast = "off"  # type: ignore[attr-defined]


def release() -> None:
    """Count one casting less; the last puts torch's own functions back."""
    global _held, _hook
    with _lock:
        _held -= 1
        if _held:
            return
        for (owner, name), own in _own.items():
            setattr(owner, name, own)
        _own.clear()
        if _hook is not None:
            _hook.remove()
            _hook = None


def _replace(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    own = getattr(owner, name, None)
    if own is None:
        return
    key = (owner, name, own)
    if key not in _made:
        _made[key] = wrap(own)
    _own[owner, name] = own
    setattr(owner, name, _made[key])


def _generator(own: Any, remember: Wrap) -> Any:
    @functools.wraps(own)
    def generator(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return own(remember(fn), *args, **kwargs)

    return generator


def _function(own: Any, remember: Wrap) -> Any:
    class CheckpointFunction(own):  # type: ignore[misc]
        """Hands the original a function that remembers its casting."""

        @staticmethod
        def apply(fn: Callable[..., Any], *args: Any) -> Any:
            return own.apply(remember(fn), *args)

    return CheckpointFunction


def _parallel_apply(own: Any, remember: Wrap) -> Any:
    @functools.wraps(own)
    def parallel_apply(modules: Any, *args: Any, **kwargs: Any) -> Any:
        return own([remember(module) for module in modules], *args, **kwargs)

    return parallel_apply
