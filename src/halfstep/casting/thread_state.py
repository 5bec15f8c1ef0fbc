"""Which casting is in force in each thread, and how torch is told: native autocast, and the function mode on its stack.

``op_casting`` decides who may put a casting in force and when it ends.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch

from ..core.oplists.tables import NATIVE
from .config import CastingConfig
from .dispatch import CastMode, function_modes, install, is_installed, set_function_modes, uninstall
from .weight_cache import WeightCache

__all__ = ["Scope", "ThreadState", "in_force", "put_in_force", "restore", "thread"]


class Scope:
    """A scope that is open in a thread, and what it will put back.

    Args:
        explicit: whether it is the user's.
        owner: who opened it and will close it.
        frame: of the call that opened it; None for a ``with`` block.
    """

    def __init__(self, explicit: bool, owner: object = None, frame: FrameType | None = None) -> None:
        self.explicit = explicit
        self.owner = owner
        self.frame = frame
        self.restores = False  # whether it changed anything
        self.patches_torch = False

    def save(self, devices: Iterable[str]) -> None:
        """Save what is in force now; native autocast on these devices."""
        self.restores = True
        self.current, self.key = thread.current, thread.key
        self.native = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices]
        self.native_cache = torch.is_autocast_cache_enabled()
        self.installed = is_installed(thread.mode)
        # After a graph break, modes that compiled code has put there are on the stack.
        modes = function_modes() if thread.traced else []
        self.traced = modes if any(isinstance(m, CastMode) and m is not thread.mode for m in modes) else None


class ThreadState(threading.local):
    """What is in force in one thread.

    Attributes:
        current: the casting in force, or None.
        key: of the casting in force, also in compiled code; empty for one that does nothing.
        explicit: whether the innermost scope is the user's.
        open: the scopes that are open, the innermost last.
        traced: what compiled code will put back.
        process: the casting of the process that this thread has joined.
        before: what was in force before it joined.
        mode: the function mode.
        cache: the copies of weights.
        leftover: whether the mode is on the stack although nothing needs it.
        changing: how many functions that change this state are running; making it counts as one.
    """

    changing = 1

    def __init__(self) -> None:
        self.current: CastingConfig | None = None
        self.key = ""
        self.explicit = False
        self.open: list[Scope] = []
        self.traced: list[Any] = []
        self.process: CastingConfig | None = None
        self.before: Scope | None = None
        self.mode = CastMode()
        self.cache = WeightCache()
        self.leftover = False
        self.changing = 0


thread = ThreadState()


def in_force(casting: CastingConfig) -> bool:
    """Whether the thread does what a casting says already. Dynamo traces this too."""
    if thread.key != casting.key and (thread.key or not casting.inert):
        return False
    if casting.lenient:
        return True
    native = [d for d in casting.devices if d in NATIVE and torch.is_autocast_enabled(d)]
    return native == list(casting.native) and all(torch.get_autocast_dtype(d) is casting.dtype for d in native)


def put_in_force(casting: CastingConfig, devices: Iterable[str]) -> None:
    """Put a casting in force: of these devices, native autocast is on for the casting's own and off for the others."""
    native = casting.native
    for device in devices:
        torch.set_autocast_enabled(device, device in native)
        if device in native:
            torch.set_autocast_dtype(device, casting.dtype)
    needs_mode = _set_current(casting)
    all_native = casting.lists.level == "native" or not needs_mode
    torch.set_autocast_cache_enabled(casting.enabled and casting.cache and all_native)
    _place_mode(needs_mode)


def restore(scope: Scope) -> None:
    """Put back what a scope saved."""
    for device, enabled, dtype in scope.native:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_cache_enabled(scope.native_cache)
    needs_mode = _set_current(scope.current)
    thread.key = scope.key
    _place_mode(scope.installed and needs_mode)  # what needed it may have ended inside of the scope
    if scope.traced is not None:
        set_function_modes(scope.traced)


def _set_current(casting: CastingConfig | None) -> bool:
    """Make the thread's mode do what a casting says; returns whether the mode is needed."""
    thread.current = thread.mode.config = casting
    thread.key = "" if casting is None or casting.inert else casting.key
    if casting is None:
        thread.mode.table = {}
    else:
        casting.apply_to(thread.mode, thread.cache, explicit=torch.compiler.is_exporting())
    return bool(thread.mode.table)


def _place_mode(wanted: bool) -> None:
    thread.leftover = thread.leftover and not wanted
    if wanted != is_installed(thread.mode):
        (install if wanted else uninstall)(thread.mode)
