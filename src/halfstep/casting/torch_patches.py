"""Functions of torch that are wrapped while any casting is in force: backward, checkpoints and DataParallel.

These are two functions of ``torch.autograd``, two names in ``torch.utils.checkpoint``, and the ``parallel_apply`` of
DataParallel, which runs replicas in threads of its own (as of torch 2.11 to 2.13). The first casting in the process
wraps them, the last puts them back. So it is with torch's setting that has ``torch.compile`` cast in backward passes
what it casts in forward, and with the hooks around the step of every optimizer.
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
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..core.torch_compat import put_back_in_compiler

__all__ = ["hold", "release", "step_begins", "step_ends"]

_data_parallel = sys.modules["torch.nn.parallel.data_parallel"]  # torch.nn.parallel has a function of that name
_lock = threading.RLock()  # the garbage collector may end a session while this thread is in here
_held = 0
_hooks: list[Any] = []
_steps = 0  # of optimizers, that have begun under casts and not ended
_originals: dict[tuple[Any, str], Any] = {}
_wrappers: dict[tuple[Any, str, Any], Any] = {}  # kept, for a class among them takes long to make

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def hold(uncast: Wrap, remember: Wrap, before_step: Callable[..., Any], after_step: Callable[..., None]) -> None:
    """Count one more casting; the first puts the wrappers in place.

    Args:
        uncast: makes a function run without casts.
        remember: makes a function run, whenever it is called, under the casting that is in force now.
        before_step: called before every step of an optimizer, as torch calls its hooks.
        after_step: called after it.
    """
    global _held
    with _lock:
        _held += 1
        if _held > 1:
            return
        _wrap(torch.autograd, "backward", uncast)
        _wrap(torch.autograd, "grad", uncast)
        _wrap(checkpoint, "_checkpoint_without_reentrant_generator", lambda own: _changing_first(remember, own))
        _wrap(checkpoint, "CheckpointFunction", lambda own: _checkpoint_function(remember, own))
        _wrap(_data_parallel, "parallel_apply", lambda own: _changing_first(lambda ms: [remember(m) for m in ms], own))
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(before_step))
            _hooks.append(register_optimizer_step_post_hook(after_step))
        compiler_config: Any = import_module("torch._functorch.config")
        _replace(compiler_config, "backward_pass_autocast", "off")


def release() -> None:
    """Count one casting less; the last puts torch's own functions back."""
    global _held
    with _lock:
        _held -= 1
        if _held:
            return
        for (owner, name), original in _originals.items():
            wrapper = getattr(owner, name)
            setattr(owner, name, original)
            if callable(original):
                put_back_in_compiler(wrapper, original)
        _originals.clear()
        # The garbage collector may end the last session inside of a step, whose second hook must still be called.
        while _hooks and not _steps:
            _hooks.pop().remove()


def step_begins() -> None:
    """Keep the hooks around steps until ``step_ends``."""
    global _steps
    with _lock:
        _steps += 1


def step_ends() -> None:
    """A step that has begun under casts is over. The next ``release`` takes the hooks off: one of them is running."""
    global _steps
    with _lock:
        _steps -= 1


def _wrap(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    original = getattr(owner, name, None)
    if original is not None:
        key = (owner, name, original)
        if key not in _wrappers:
            _wrappers[key] = wrap(original)
        _replace(owner, name, _wrappers[key])


def _replace(owner: Any, name: str, value: Any) -> None:
    if hasattr(owner, name):
        _originals[owner, name] = getattr(owner, name)
        setattr(owner, name, value)


def _changing_first(change: Callable[[Any], Any], own: Any) -> Any:
    """A function that changes its first argument."""

    @functools.wraps(own)
    def changing_first(first: Any, *args: Any, **kwargs: Any) -> Any:
        return own(change(first), *args, **kwargs)

    return changing_first


def _checkpoint_function(remember: Wrap, own: Any) -> Any:
    class CheckpointFunction(own):  # type: ignore[misc]
        """Hands the original a function that remembers its casting."""

        @staticmethod
        def apply(function: Callable[..., Any], *args: Any) -> Any:
            return own.apply(remember(function), *args)

    return CheckpointFunction
