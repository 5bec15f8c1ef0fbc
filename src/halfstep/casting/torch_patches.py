"""Names of torch that have wrappers while anybody holds them. ``scope`` says which, and why."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

__all__ = ["Patches", "applied_to", "changing_first"]

Wrap = Callable[[Any], Any]


class Patches:
    """Replacements of names of torch. The first holder has them put on, the last has torch's own put back.

    Args:
        wraps: for the name of a module and of something in it, what makes the replacement from what is there. Names
            that this torch does not have are left out.
        step_hooks: hooks before and after the step of every optimizer, or nothing.
    """

    def __init__(self, wraps: Mapping[tuple[str, str], Wrap], step_hooks: tuple[Any, ...] = ()) -> None:
        self._wraps = {name: functools.cache(wrap) for name, wrap in wraps.items()}  # a class takes long to make
        self._step_hooks = step_hooks
        self._holders: set[object] = set()
        self._originals: list[tuple[Any, str, Any]] = []
        self._handles: list[Any] = []
        self._lock = threading.Lock()  # each thread may be the first to hold them, or the last

    def hold(self, holder: object) -> None:
        """Have the replacements in place until this holder, and all others, release them."""
        with self._lock:
            for (module, name), wrap in self._wraps.items() if not self._holders else ():
                owner = import_module(module)
                original = getattr(owner, name, None)
                if original is not None:
                    self._originals.append((owner, name, original))
                    setattr(owner, name, wrap(original))
            if self._step_hooks and not self._holders:
                before, after = self._step_hooks
                self._handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
            self._holders.add(holder)

    def release(self, holder: object) -> None:
        """Hold them no more; a second call does nothing."""
        with self._lock:
            if self._holders == {holder}:
                while self._originals:
                    setattr(*self._originals.pop())
                while self._handles:
                    self._handles.pop().remove()
            self._holders.discard(holder)


def changing_first(change: Callable[[Any], Any]) -> Wrap:
    """A wrapper of functions that changes their first argument."""

    def wrap(own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def changed(first: Any, *args: Any, **kwargs: Any) -> Any:
            return own(change(first), *args, **kwargs)

        return changed

    return wrap


def applied_to(change: Callable[[Any], Any]) -> Wrap:
    """A wrapper of an ``autograd.Function`` that changes the first thing it is applied to."""
    return lambda own: type(own)(own.__name__, (own,), {"apply": staticmethod(changing_first(change)(own.apply))})
