"""The O1 sessions of the process, and which of them a thread has joined: it casts outside of models."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch

from .config import CastingConfig
from .current import Scope, restore, restore_native, set_current, thread
from .torch_patches import around_casts, around_recomputation

__all__ = ["Session", "add", "in_autocast", "join", "latest_session", "leave_sessions", "sessions"]


class Session:
    """Casts in the whole process, outside of models, as Apex had them: what O1 and its handle do.

    Args:
        casting: what is done to ops.
        owners: models and optimizers, held weakly. The session is over when all of them are gone; without any it ends
            by ``scope.end_session``.
    """

    def __init__(self, casting: CastingConfig, owners: Iterable[object] = ()) -> None:
        self.casting = casting
        self.owners: list[Callable[[], object]] = [weakref.ref(owner) for owner in owners] or [lambda: self]

    def is_over(self) -> bool:
        """Whether nobody needs it any more."""
        if self.owners and self.owners[0]() is None:
            self.owners = [owner for owner in self.owners if owner() is not None]
        return not self.owners

    def leave(self) -> None:
        """An op of this thread has found that the session is over: the next session is current, or nothing.

        The mode runs the op, so it cannot be taken off torch's stack. A ``torch.autocast`` block of the user's that is
        around the op has native autocast as it should be. ``scope.join_session`` does the rest.
        """
        following = next((session for session in reversed(sessions) if not session.is_over()), None)
        if following is not None and not in_autocast():
            join(following, in_op=True)
            return
        thread.current, thread.key, thread.mode.session, thread.mode.table = None, "", None, {}
        thread.cache.in_session = False
        if thread.before is not None and not in_autocast():
            restore_native(thread.before)


sessions: list[Session] = []
"""The sessions that were not found to be over, the latest last."""


def latest_session() -> Session | None:
    """The latest session that is not over, or None. Torch's own functions are put back if there is none."""
    for session in [session for session in sessions if session.is_over()]:
        if session in sessions:
            sessions.remove(session)
        around_casts.release(session)
        around_recomputation.release(session)
    return sessions[-1] if sessions else None


def add(session: Session, at: int | None = None) -> None:
    """Begin a session, which goes before all others, or has this place among them."""
    around_casts.hold(session)
    around_recomputation.hold(session)
    sessions.insert(len(sessions) if at is None else at, session)


def join(session: Session, *, in_op: bool = False) -> None:
    """Make the casting of a session current in this thread; ``in_op`` as of ``set_current``."""
    thread.cache.clear()
    native = session.casting.native
    if thread.before is None:
        thread.before = Scope(explicit=False)
        thread.before.save(native)
    restore_native(thread.before)
    known = [device for device, _, _ in thread.before.native]
    thread.before.native += [
        (d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in native if d not in known
    ]
    set_current(session.casting, native, session, in_op=in_op)
    thread.session = session
    thread.cache.in_session = True


def leave_sessions() -> None:
    """Have this thread do what it did before it joined its first session."""
    thread.cache.clear()
    assert thread.before is not None
    restore(thread.before)
    thread.session = thread.before = None
    thread.cache.in_session = False


def in_autocast() -> bool:
    """Whether this thread is in a ``torch.autocast`` block (a checkpoint has one), which restores what it found."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting() > 0
