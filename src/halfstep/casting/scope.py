"""The scopes in which a thread casts: native ``torch.autocast`` where torch has it, and on top of it a function mode if
the op lists differ, or if products are emulated.

One casting (``OpCasting``) is current in a thread. Three things make it so, and the innermost decides:

- a session of O1: the latest one of the process that is not over, outside of every model;
- a model that was brought up at a level, while its ``forward`` runs;
- the user, by an explicit scope (``with OpCasting(...)``): a model inside computes as the scope says.

A session is over when its models and optimizers are gone. The next op or scope asks for that, and goes on without it.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ContextDecorator
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..core.oplists.tables import NATIVE
from . import dynamo
from .autograd_functions import with_inputs_cast
from .config import NOTHING, CastingConfig
from .current import (
    ENDED,
    Patches,
    Scope,
    changing_first,
    clear_cache,
    close,
    close_interrupted,
    in_autocast,
    is_current,
    is_recorded,
    leave_traced,
    restore,
    save,
    set_current,
    set_native,
    thread,
)
from .dispatch import function_modes

__all__ = [
    "NO_CASTING",
    "OpCasting",
    "active_casting",
    "begin_session",
    "deactivate",
    "disable_casts",
    "end_session",
    "enter",
    "join_session",
    "keep_session",
    "leave",
    "moved_to",
    "session_casting",
]


class OpCasting(CastingConfig, ContextDecorator):
    """The casting of ops, and a scope in which it holds; thread-local, re-entrant.

    An inner scope replaces the outer one. Backward passes inside are not cast, and activation checkpoints made inside
    recompute under the same lists.
    """

    def __enter__(self) -> OpCasting:
        if torch.compiler.is_dynamo_compiling():
            dynamo.enter_scope(self)
        else:
            enter(self, self, sys._getframe(1) if self.by_call else None, explicit=True)
        return self

    def __exit__(self, *exc: object) -> None:
        if torch.compiler.is_dynamo_compiling():
            leave_traced()
        else:
            leave(self)


NO_CASTING = OpCasting(None, enabled=False, emulate=False, devices=NATIVE)
"""A scope without casts and emulation, in which the function mode does nothing."""


_ONLY_MEETING = OpCasting(None, enabled=False, emulate=False, devices=NATIVE, meets=True)
"""A scope in which only those ops are cast that torch has refused."""
# The casting around the backward pass has reached already what runs later.
NO_CASTING.by_call = _ONLY_MEETING.by_call = _ONLY_MEETING.reaches_later = True


# ---- scopes of one thread


def enter(casting: CastingConfig, owner: object, frame: FrameType | None = None, *, explicit: bool = False) -> Scope:
    """Make a casting current: of a model while it runs, unless an explicit scope is around it, or in an explicit scope.

    Returns the new scope.

    Args:
        casting: one that is not enabled casts nothing, and may emulate.
        owner: the object that will leave again.
        frame: the frame of the call of the model; None for a ``with`` block.
        explicit: True if it wins over explicit scopes around it.
    """
    if casting.enabled and not explicit:
        join_session()
    elif thread.open or thread.traced:
        close_interrupted()
    # The scope is in the list before anything changes: ``close_interrupted`` finds it after an interrupt in here.
    scope, outer = Scope(owner, ENDED), thread.mode.frame
    thread.open.append(scope)
    if explicit or not (thread.explicit or (is_current(casting) and not is_recorded())):
        # A torch.autocast of the user's around this is turned off, but for models that have no casts of their own.
        mine = [] if casting.keeps_autocast else [d for d in casting.devices if d in NATIVE]
        scope.saved = save(dict.fromkeys((*casting.native, *thread.mode.config.native, *mine)))
        thread.mode.frame = ENDED
        if casting.enabled:
            scope.patches = around_casts
            around_casts.hold(scope)
        if not casting.reaches_later:
            _reach_later(casting)
        set_current(casting, [device for device, _, _ in scope.saved.native])
        thread.explicit = explicit
    scope.frame, thread.mode.frame = frame, frame or outer
    return scope


def leave(owner: object) -> None:
    """Put back what was current before the latest scope of an owner: its block has ended, or its model has run."""
    if close(owner):
        if not thread.open and (sessions or thread.session is not None):
            join_session()
    elif thread.traced:  # it was entered in compiled code, before a graph break
        leave_traced()


def active_casting() -> OpCasting | None:
    """The current casting of this thread, or None if nothing is cast."""
    current = thread.mode.config
    return current if isinstance(current, OpCasting) and current.enabled else None


def disable_casts() -> AbstractContextManager[Any]:
    """A scope or decorator without op casting, in this thread; exceptions and nesting leave it as they found it."""
    return OpCasting(None, enabled=False)


# ---- sessions of the process


class Session:
    """Casts in the whole process, outside of models, as Apex had them: what O1 and its handle do.

    Args:
        casting: the casting of ops.
        owners: models and optimizers, held weakly. The session is over when all of them are gone; without any it ends
            by ``end_session``.
    """

    def __init__(self, casting: CastingConfig, owners: Iterable[object] = ()) -> None:
        self.casting = casting
        self.owners: list[Callable[[], object]] = [weakref.ref(owner) for owner in owners] or [lambda: self]

    def is_over(self) -> bool:
        """True if all owners are gone."""
        if self.owners and self.owners[0]() is None:
            self.owners = [owner for owner in self.owners if owner() is not None]
        return not self.owners

    def leave(self) -> None:
        """An op of this thread has found that the session is over: the next session is current, or nothing.

        The mode runs the op, so it cannot be taken off torch's stack. A ``torch.autocast`` block of the user's that is
        around the op has native autocast as it should be. ``join_session`` does the rest.
        """
        following = next((session for session in reversed(sessions) if not session.is_over()), None)
        if following is not None and not in_autocast():
            _join(following, in_op=True)
            return
        set_current(NOTHING, (), in_op=True)
        if thread.before is not None and not in_autocast():
            set_native(thread.before.native)


sessions: list[Session] = []
"""The sessions that were not found to be over, the latest last."""


def _latest_session() -> Session | None:
    """The latest session that is not over, or None. Torch's own functions are put back if there is none."""
    for session in [session for session in sessions if session.is_over()]:
        if session in sessions:
            sessions.remove(session)
        around_casts.release(session)
    return sessions[-1] if sessions else None


def session_casting() -> CastingConfig | None:
    """The casting of the latest session, or None."""
    return getattr(_latest_session(), "casting", None)


def begin_session(casting: OpCasting, owners: Iterable[object] = ()) -> None:
    """Cast ops in the whole process from now on: in this thread at once, in others when they run an O1 model.

    Args:
        casting: the casting; the latest session decides, and a session that casts goes before sessions that do not.
        owners: see ``Session``.
    """
    session = Session(casting, owners)
    if casting.enabled:
        around_casts.hold(session)
    sessions.insert(len(sessions) if casting.enabled else 0, session)
    join_session()


def keep_session(casting: OpCasting, owner: object) -> None:
    """Let the session with this very casting last as long as an owner more, if it is not over."""
    for session in sessions:
        if session.casting is casting and not session.is_over():
            session.owners = [*session.owners, weakref.ref(owner)]


def end_session(casting: OpCasting | None = None) -> None:
    """End the session with this very casting, or all; the one before is current again."""
    for session in sessions:
        if casting in (None, session.casting):
            session.owners = []
    join_session()


def deactivate() -> None:
    """End all casting in the whole process; this thread gets back what it had before.

    Models that were brought up at O1 still compute by their level; what is outside of them is not cast any more.
    """
    end_session()


def moved_to(device_type: str, casting: OpCasting) -> OpCasting:
    """The casting of a model that has moved to another type of device; a session with this casting follows."""
    new = OpCasting(**{**casting.settings, "devices": {*casting.devices, device_type}})
    for session in sessions:
        if session.casting is casting:
            session.casting = new
    join_session()
    return new


def join_session() -> None:
    """Make the casting of the latest session current in this thread: every O1 model calls this before its forward.

    Inside of a scope nothing changes; the thread joins when the scope is left.
    """
    if torch.compiler.is_dynamo_compiling():
        return
    if thread.open or thread.traced:
        close_interrupted()
    latest = _latest_session() if sessions else None
    joined = thread.session is latest and (latest is None or thread.mode.config is latest.casting)
    if joined or thread.open or thread.traced:
        return
    if thread.mode.is_needed and thread.mode not in function_modes():
        return  # the mode runs an op, after which it is on torch's stack again
    if thread.session is not None and thread.session.is_over() and in_autocast():
        return  # native autocast is the user's until that block ends
    if latest is not None:
        _join(latest)
    elif thread.before is not None:  # as it was before the thread joined its first session
        restore(thread.before)
        thread.session = thread.before = None


def _join(session: Session, *, in_op: bool = False) -> None:
    """Make the casting of a session current in this thread; ``in_op`` as of ``set_current``."""
    native = session.casting.native
    if not session.casting.reaches_later:
        _reach_later(session.casting)
    before = thread.before = thread.before or save(native)
    set_native(before.native)
    known = [device for device, _, _ in before.native]
    before.native.extend(save(device for device in native if device not in known).native)
    set_current(session.casting, native, session, in_op=in_op)
    thread.session = session


# ---- functions of torch that have wrappers while a casting is current anywhere


def _uncast(run_backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass without casts: its ops have the dtypes that forward chose."""

    @functools.wraps(run_backward)
    def uncast(*args: Any, **kwargs: Any) -> Any:
        _latest_session()
        clear_cache()
        with _ONLY_MEETING:  # in the Python code of users' autograd functions and hooks
            return run_backward(*args, **kwargs)

    return uncast


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a step of any optimizer without casts, and a closure given to it under the casts that are current now.

    Nothing in here asks whether a session is over: torch goes through its hooks, and this is one that would be removed.
    """
    if torch.compiler.is_dynamo_compiling() or active_casting() is None:
        return None
    args = tuple(_remember(each) if callable(each) else each for each in args)
    if kwargs.get("closure") is not None:
        kwargs = {**kwargs, "closure": _remember(kwargs["closure"])}
    enter(NO_CASTING, optimizer, sys._getframe(1), explicit=True)  # a step that fails has no second hook
    return args, kwargs


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Put back the casts, and forget the casts of weights: a fused step writes to weights without a new version."""
    if not torch.compiler.is_dynamo_compiling():
        close(optimizer)
        clear_cache()


def _remember(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs under the casting that is current now, for a checkpoint that recomputes it later."""
    casting, explicit = thread.mode.config, thread.explicit
    if casting is NOTHING:
        return function
    native = save(casting.native).native

    @functools.wraps(function, updated=())
    def remembering(*args: Any, **kwargs: Any) -> Any:
        if thread.mode.config is casting and (not thread.mode.is_needed or thread.mode in function_modes()):
            return function(*args, **kwargs)
        owner = object()
        enter(casting, owner, explicit=True)
        thread.explicit = explicit
        set_native(native)  # the user may have turned it off, or to another dtype, inside
        try:
            return function(*args, **kwargs)
        finally:
            leave(owner)

    return remembering


around_casts = Patches(
    {
        ("torch.autograd", "_engine_run_backward"): _uncast,
        ("torch._functorch.config", "backward_pass_autocast"): lambda own: "off",  # or it casts there what forward did
    },
    {register_optimizer_step_pre_hook: _before_step, register_optimizer_step_post_hook: _after_step},
)
"""Held while ops are cast: a backward pass and a step run without casts."""

around_recomputation = Patches(
    {
        ("torch.utils.checkpoint", "_checkpoint_without_reentrant_generator"): changing_first(_remember),
        ("torch.autograd.function:Function", "apply"): functools.partial(with_inputs_cast, _remember, around_casts),
        ("torch.nn.parallel.data_parallel", "parallel_apply"): changing_first(lambda ms: [_remember(m) for m in ms]),
    }
)
"""Functions of torch that run user code later or in another thread, and keep the casting of this moment. Each casting
that was in force holds these for as long as it exists: a model may begin to use checkpoints in any pass, and each pass
would pay for putting them on and off."""


def _reach_later(casting: CastingConfig) -> None:
    """Have what is recomputed, and other threads, follow a casting, until it is gone."""
    casting.reaches_later = True
    around_recomputation.hold_while(casting)
