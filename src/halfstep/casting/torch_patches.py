"""Names of torch that have wrappers while anybody holds them. ``scope`` says which, and why."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..core.torch_compat import put_back_in_compiler

__all__ = ["Patches", "around_casts", "around_recomputation", "changing_first", "checkpoint_function"]

Wrap = Callable[[Any], Any]

_lock = threading.Lock()  # the names belong to the process, and each thread may be the first to hold them, or the last


class Patches:
    """Replacements of names of torch. The first holder has them put on, the last has torch's own put back.

    Attributes:
        wraps: for the name of a module and of something in it, what makes the replacement from what is there. Names
            that this torch does not have are left out.
        step_hooks: hooks before and after the step of every optimizer, or nothing.
    """

    def __init__(self) -> None:
        self.wraps: Mapping[tuple[str, str], Wrap] = {}
        self.step_hooks: tuple[Any, ...] = ()
        self._holders: set[object] = set()
        self._originals: dict[tuple[Any, str], Any] = {}
        self._made: dict[tuple[str, str, Any], Any] = {}  # kept, for a class among them takes long to make
        self._handles: list[Any] = []

    def hold(self, holder: object) -> None:
        """Have the replacements in place until this holder, and all others, release them."""
        with _lock:
            if not self._holders:
                self._put_on()
            self._holders.add(holder)

    def release(self, holder: object) -> None:
        """Hold them no more; a second call does nothing."""
        with _lock:
            if holder in self._holders:
                self._holders.remove(holder)
                if not self._holders:
                    self._take_off()

    def _put_on(self) -> None:
        for (module, name), wrap in self.wraps.items():
            owner = import_module(module)
            original = getattr(owner, name, None)
            if original is not None:
                key = (module, name, original)
                if key not in self._made:
                    self._made[key] = wrap(original)
                self._originals[owner, name] = original
                setattr(owner, name, self._made[key])
        if self.step_hooks:
            before, after = self.step_hooks
            self._handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]

    def _take_off(self) -> None:
        for (owner, name), original in self._originals.items():
            setattr(owner, name, original)
        put_back_in_compiler(
            (self._made[owner.__name__, name, own], own) for (owner, name), own in self._originals.items()
        )
        self._originals.clear()
        while self._handles:
            self._handles.pop().remove()


around_casts = Patches()
"""Held while ops are cast: a backward pass and a step run without casts."""

around_recomputation = Patches()
"""Held while ops are cast or emulated: what runs later, or in another thread, does as it would here."""


def changing_first(change: Callable[[Any], Any]) -> Wrap:
    """A wrapper of functions that changes their first argument."""

    def wrap(own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def changed(first: Any, *args: Any, **kwargs: Any) -> Any:
            return own(change(first), *args, **kwargs)

        return changed

    return wrap


def checkpoint_function(change: Callable[[Any], Any]) -> Wrap:
    """A wrapper of torch's ``CheckpointFunction`` that changes the function it is given."""

    def wrap(own: Any) -> Any:
        class CheckpointFunction(own):  # type: ignore[misc]
            """Hands the original another function."""

            @staticmethod
            def apply(function: Callable[..., Any], *args: Any) -> Any:
                return own.apply(change(function), *args)

        return CheckpointFunction

    return wrap
