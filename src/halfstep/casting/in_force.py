"""What is in force in one thread, and what torch is told of it: native autocast, and the function mode on its stack.

Who may put a casting in force, and when it ends, is for ``ops`` to say.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from . import compiled
from .mode import CastMode, install, uninstall
from .weight_cache import WeightCache

if TYPE_CHECKING:
    from .scopes import OpCasting

__all__ = ["Open", "Thread", "installed", "put", "restore", "thread"]


class Open:
    """A scope that is open in a thread, and what it will put back."""

    def __init__(self, explicit: bool, owner: object = None, frame: FrameType | None = None) -> None:
        self.explicit = explicit
        self.owner = owner
        self.frame = frame
        self.restores = False
        self.held = False

    def capture(self, devices: Iterable[str]) -> None:
        """Remember what is in force now."""
        self.restores = True
        self.current, self.key = thread.current, thread.key
        self.native = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices]
        self.native_cache = torch.is_autocast_cache_enabled()
        self.installed = installed()
        modes = compiled.stack() if thread.traced else []
        # After a graph break, modes that compiled code has put there are on the stack.
        self.traced = modes if any(isinstance(m, CastMode) and m is not thread.mode for m in modes) else None


class Thread(threading.local):
    """What is in force in one thread."""

    def __init__(self) -> None:
        self.current: OpCasting | None = None
        self.key = ""  # of what is in force, also in compiled code
        self.explicit = False  # whether the innermost scope is the user's
        self.traced: list[Any] = []  # what compiled code will put back
        self.process: OpCasting | None = None
        self.before: Open | None = None
        self.open: list[Open] = []
        self.mode = CastMode()
        self.cache = WeightCache()
        self.leftover = False  # whether the mode is on the stack although nothing needs it
        self.busy = 0  # how many of the functions that change this are under way


thread = Thread()


def installed() -> bool:
    """Whether the thread's mode is on the stack; inside its own ``__torch_function__`` it is not."""
    size = torch._C._len_torch_function_stack()
    return any(torch._C._get_function_stack_at(i) is thread.mode for i in range(size))


def put(casting: OpCasting, devices: Iterable[str]) -> None:
    """Put a casting in force: native autocast on for its own devices and off for the others of these."""
    native = casting.native
    for device in devices:
        torch.set_autocast_enabled(device, device in native)
        if device in native:
            torch.set_autocast_dtype(device, casting.dtype)
    wanted = _set_current(casting)
    all_native = casting.lists.level == "native" or not wanted
    torch.set_autocast_cache_enabled(casting.enabled and casting.cache and all_native)
    _place(wanted)


def _set_current(casting: OpCasting | None) -> bool:
    """Make the thread's mode do what a casting says; whether it is needed at all."""
    thread.current = casting
    thread.key = "" if casting is None or casting.inert else casting.key
    if casting is None:
        thread.mode.table = {}
    else:
        casting.set_up(thread.mode, thread.cache, explicit=torch.compiler.is_exporting())
    return bool(thread.mode.table)


def restore(scope: Open) -> None:
    """Put back what a scope found."""
    for device, enabled, dtype in scope.native:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_cache_enabled(scope.native_cache)
    _set_current(scope.current)
    thread.key = scope.key
    _place(scope.installed)
    if scope.traced is not None:
        compiled.put_stack(scope.traced)


def _place(wanted: bool) -> None:
    thread.leftover = thread.leftover and not wanted
    if wanted != installed():
        (install if wanted else uninstall)(thread.mode)
