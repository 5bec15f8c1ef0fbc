"""The castings of the whole process, each of a session of O1 or of a handle: the latest that has not ended is in force.

It is what is done to ops outside of models, as Apex had it. A session ends by hand, or with its models and optimizers.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable

import torch

from . import scopes as ops
from . import torch_patches as guards
from .scopes import OpCasting
from .spec import restored

__all__ = ["activate", "deactivate", "moved", "process_casting", "retire"]


class _Session:
    """A casting of the process, in force while it is the latest that has not ended."""

    def __init__(self, casting: OpCasting) -> None:
        self.casting = casting
        self.owners = 0


_lock = threading.Lock()
_sessions: list[_Session] = []
_ended: list[_Session] = []


def process_casting() -> OpCasting | None:
    """The casting of the whole process, that of the latest session, or None."""
    try:
        return _sessions[-1].casting
    except IndexError:
        return None


def activate(casting: OpCasting, owners: Iterable[object] = ()) -> None:
    """Cast ops in the whole process from now on: in this thread at once, in others when they run an O1 model.

    Args:
        casting: what to do; the latest decides.
        owners: when all of these are gone, so is the casting; with none it stays until ``retire``.
    """
    session = _Session(casting)
    for owner in owners:
        session.owners += 1
        weakref.finalize(owner, _owner_gone, session).atexit = False
    ops.hold()
    with _lock:
        _sessions.append(session)
    _end([])


def retire(casting: OpCasting) -> None:
    """End what ``activate`` began with this very casting, if it has not ended; the one before is in force again."""
    _end([session for session in _sessions if session.casting is casting])


def deactivate() -> None:
    """Take all process-wide casting down; this thread gets back what it had before.

    Models that were brought up at O1 go on computing by their level; what is outside of them is not cast any more.
    """
    _end(list(_sessions))


def moved(casting: OpCasting, device_type: str) -> OpCasting:
    """The casting of a model that has moved to a device of another type; a session with this casting moves too."""
    *others, devices, emulate, lenient = casting.settings
    new = restored(OpCasting, *others, {*devices, device_type}, emulate, lenient)
    for session in _sessions:
        if session.casting is casting:
            session.casting = new
    ops.follow(process_casting())
    return new


def _owner_gone(session: _Session) -> None:
    session.owners -= 1
    if session.owners == 0:
        _end([session], at_once=not _in_autocast())


def _in_autocast() -> bool:
    """Whether this thread is in a ``torch.autocast`` block, which puts back what it found, a checkpoint's included."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting() > 0


def _end(sessions: list[_Session], *, at_once: bool = True) -> None:
    """End sessions. The garbage collector may call this at any point, also inside of itself: it never waits.

    Args:
        sessions: some that may have ended before.
        at_once: whether this thread is to follow now; otherwise it does with its next model or scope.
    """
    _ended.extend(sessions)
    while _ended and _lock.acquire(blocking=False):
        try:
            session = _ended.pop()
            there = session in _sessions
            if there:
                _sessions.remove(session)
        finally:
            _lock.release()
        if there:
            guards.release()
    ops.follow(process_casting(), at_once=at_once)
