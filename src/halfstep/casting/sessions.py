"""Casting in the whole process, as Apex had it: what O1 and its handle do to ops outside of models.

The latest session that has not ended is in force. A session ends by a call, or with its models and optimizers.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable

import torch

from . import torch_patches
from .op_casting import OpCasting, patch_torch, set_process_casting

__all__ = ["begin_session", "deactivate", "end_session", "keep_session", "moved_to", "process_casting"]


class _Session:
    def __init__(self, casting: OpCasting) -> None:
        self.casting = casting
        self.owners = 0  # how many are alive

    def add(self, owner: object) -> None:
        """The session lasts as long as this owner, at least."""
        self.owners += 1
        weakref.finalize(owner, _owner_gone, self).atexit = False


_lock = threading.Lock()
_sessions: list[_Session] = []
_ended: list[_Session] = []


def process_casting() -> OpCasting | None:
    """The casting of the latest session, or None."""
    latest = _sessions[-1:]  # a copy: the garbage collector may end a session at any point
    return latest[0].casting if latest else None


def begin_session(casting: OpCasting, owners: Iterable[object] = ()) -> None:
    """Cast ops in the whole process from now on: in this thread at once, in others when they run an O1 model.

    Args:
        casting: what to do; the latest session decides.
        owners: the session ends when all of these are gone; without any it ends by ``end_session``.
    """
    session = _Session(casting)
    for owner in owners:
        session.add(owner)
    patch_torch()
    with _lock:
        _sessions.append(session)
    _end([])


def keep_session(casting: OpCasting, owner: object) -> None:
    """Let the session with this very casting last as long as an owner more, if it has not ended."""
    for session in _sessions:
        if session.casting is casting and session.owners:
            session.add(owner)


def end_session(casting: OpCasting) -> None:
    """End the session with this very casting, if it has not ended; the one before is in force again."""
    _end([session for session in _sessions if session.casting is casting])


def deactivate() -> None:
    """End all casting in the whole process; this thread gets back what it had before.

    Models that were brought up at O1 still compute by their level; what is outside of them is not cast any more.
    """
    _end(list(_sessions))


def moved_to(device_type: str, casting: OpCasting) -> OpCasting:
    """The casting of a model that has moved to another type of device; a session with this casting follows."""
    new = OpCasting(**{**casting.settings, "devices": {*casting.devices, device_type}})
    for session in _sessions:
        if session.casting is casting:
            session.casting = new
    set_process_casting(process_casting())
    return new


def _owner_gone(session: _Session) -> None:
    session.owners -= 1
    if session.owners == 0:
        _end([session], at_once=not _in_autocast())


def _in_autocast() -> bool:
    """Whether this thread is in a ``torch.autocast`` block (a checkpoint has one), which restores what it found."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting() > 0


def _end(sessions: list[_Session], *, at_once: bool = True) -> None:
    """End sessions. The garbage collector may call this at any point, also while it runs: so it never waits.

    Args:
        sessions: some may have ended before.
        at_once: whether this thread changes now; otherwise it does so with its next model or scope.
    """
    _ended.extend(sessions)
    while _ended and _lock.acquire(blocking=False):
        try:
            session = _ended.pop()
            found = session in _sessions
            if found:
                _sessions.remove(session)
        finally:
            _lock.release()
        if found:
            torch_patches.release()
    set_process_casting(process_casting(), at_once=at_once)
