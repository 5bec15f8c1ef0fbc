"""The casting that is current in each thread, and how torch is told: native autocast, and the mode on its stack.

``scope`` decides which casting that is.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch

from ..core.oplists.tables import NATIVE
from .config import CastingConfig
from .dispatch import CastMode, SessionEnd, function_modes, is_installed, place, set_function_modes
from .torch_patches import Patches
from .weight_cache import WeightCache

__all__ = ["Scope", "ThreadState", "is_current", "restore", "restore_native", "set_current", "thread"]


class Scope:
    """An open scope of a thread, and the state that its end puts back.

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
        self.patches: list[Patches] = []  # what it holds

    def save(self, devices: Iterable[str]) -> None:
        """Save the present state; that of native autocast on these devices."""
        self.restores = True
        self.current, self.key, self.session = thread.current, thread.key, thread.mode.session
        self.native = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices]
        self.native_cache = torch.is_autocast_cache_enabled()
        self.installed = is_installed(thread.mode)
        # After a graph break, modes that compiled code has put there are on the stack.
        modes = function_modes() if thread.traced else []
        self.traced = modes if any(isinstance(m, CastMode) and m is not thread.mode for m in modes) else None


class ThreadState(threading.local):
    """The state of one thread.

    Attributes:
        current: the current casting, or None.
        key: of the current casting, also in compiled code; empty for one that does nothing.
        explicit: whether the innermost scope is the user's.
        open: the open scopes, the innermost last.
        traced: the states that compiled code will put back.
        session: the O1 session that the thread has joined, or None. One that is over stays here until it is left.
        before: the state before the thread joined its first session.
        mode: the function mode.
        cache: the casts of weights.
    """

    def __init__(self) -> None:
        self.current: CastingConfig | None = None
        self.key = ""
        self.explicit = False
        self.open: list[Scope] = []
        self.traced: list[Any] = []
        self.session: SessionEnd | None = None
        self.before: Scope | None = None
        self.mode = CastMode()
        self.cache = WeightCache()


thread = ThreadState()


def is_current(casting: CastingConfig) -> bool:
    """Whether the thread does what a casting says already. Dynamo traces this too."""
    if thread.key != casting.key and (thread.key or not casting.is_noop):
        return False
    if casting.keeps_autocast:
        return True
    native = [d for d in casting.devices if d in NATIVE and torch.is_autocast_enabled(d)]
    return native == list(casting.native) and all(torch.get_autocast_dtype(d) is casting.dtype for d in native)


def set_current(
    casting: CastingConfig, devices: Iterable[str], session: SessionEnd | None = None, *, in_op: bool = False
) -> None:
    """Make a casting current: of these devices, native autocast is on for the casting's own and off for the others.

    Args:
        casting: the casting.
        devices: types of devices.
        session: the session whose casting it is; every op asks whether it is over.
        in_op: whether the mode runs an op, after which it is on torch's stack again.
    """
    for device in devices:
        torch.set_autocast_enabled(device, device in casting.native)
        if device in casting.native:
            torch.set_autocast_dtype(device, casting.dtype)
    _tell_mode(casting, session)
    all_native = casting.lists.level == "native" or not thread.mode.table
    torch.set_autocast_cache_enabled(casting.enabled and casting.cache and all_native)
    if not in_op:
        place(thread.mode, thread.mode.is_needed)


def restore_native(scope: Scope) -> None:
    """Put back the state of native autocast that a scope saved."""
    for device, enabled, dtype in scope.native:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


def restore(scope: Scope) -> None:
    """Put back what a scope saved."""
    restore_native(scope)
    torch.set_autocast_cache_enabled(scope.native_cache)
    _tell_mode(scope.current, scope.session)
    thread.key = scope.key
    place(thread.mode, scope.installed and thread.mode.is_needed)
    if scope.traced is not None:
        set_function_modes(scope.traced)


def _tell_mode(casting: CastingConfig | None, session: SessionEnd | None) -> None:
    """Make the thread's mode do what a casting says."""
    thread.current, thread.mode.session = casting, session
    thread.key = "" if casting is None or casting.is_noop else casting.key
    if casting is None:
        thread.mode.table = {}
    else:
        casting.apply_to(thread.mode, thread.cache, explicit=torch.compiler.is_exporting())
