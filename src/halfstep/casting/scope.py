"""The scopes in which a thread casts ops: with native ``torch.autocast`` if torch has it for the device, and with a
function mode as well if the op lists differ from torch's or products are emulated.

One casting (``OpCasting``) is current in a thread. It comes from one of three sources, the innermost of which decides:

- an O1 session: the latest session of the process that is not over, outside every model;
- a model that ``amp.initialize`` or ``amp.decorate`` cast, while its ``forward`` runs;
- an explicit scope of user code (``with OpCasting(...)``): models called in the block compute under its casting.

A session is over when Python has freed its models and optimizers. No call announces this: the next op or scope of each
thread checks it. An op checks from within the function mode, when torch has taken the mode off its stack and will push
it again, so ``CastingSession.leave`` may change the settings of the mode but not the stack. ``join_session`` does the
rest at the next scope: it removes the mode, restores native autocast and ``thread.outer``. Both halves must stay.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ContextDecorator, nullcontext
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..core.oplists.tables import NATIVE
from ..torch_internals.compiler_compat import not_by_itself
from . import dynamo
from .autograd_functions import with_inputs_cast
from .config import NOTHING, CastingConfig
from .current import (
    ENDED,
    OpScope,
    Patches,
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
    """A casting of ops that is also a context manager; thread-local and re-entrant.

    An inner scope replaces the outer one. Backward passes within the block are not cast, and activation checkpoints
    created in it recompute under the same lists.
    """

    @not_by_itself
    def __enter__(self) -> OpCasting:
        if torch.compiler.is_dynamo_compiling():
            dynamo.enter_scope(self)
        else:
            enter(self, self, sys._getframe(1) if self.by_call else None, explicit=True)
        return self

    @not_by_itself
    def __exit__(self, *exc: object) -> None:
        if torch.compiler.is_dynamo_compiling():
            leave_traced()
        else:
            leave(self)


NO_CASTING = OpCasting(None, enabled=False, emulate=False, devices=NATIVE)
"""A scope without casts and emulation, in which the function mode does nothing."""


_ONLY_RETRIES = OpCasting(None, enabled=False, emulate=False, devices=NATIVE, retries=True)
"""A scope that casts only the arguments of ops that torch refused."""
# The casting around the backward pass already holds the patches for code that runs later.
NO_CASTING.by_call = _ONLY_RETRIES.by_call = _ONLY_RETRIES.reaches_later = True


# ---- scopes of one thread


def enter(casting: CastingConfig, owner: object, frame: FrameType | None = None, *, explicit: bool = False) -> OpScope:
    """Open a scope, and make its casting current unless an explicit scope around a model decides.

    Args:
        casting: the casting; if it is not enabled, it casts nothing but may emulate.
        owner: the object that will call ``leave``.
        frame: the frame of the call of the model; None for a ``with`` block.
        explicit: True if the casting overrides explicit scopes around it.

    Returns:
        The new scope.
    """
    if casting.enabled and not explicit:
        join_session()
    elif thread.open or thread.traced:
        close_interrupted()
    # Add the scope to the list before anything changes, so that `close_interrupted` finds it after an interrupt here.
    scope, outer, thread.mode.frame = OpScope(owner, ENDED), thread.mode.frame, sys._getframe()
    thread.open.append(scope)
    if explicit or not (thread.explicit or (is_current(casting) and not is_recorded())):
        # Turn off a user's torch.autocast around the scope, except for models that cast nothing themselves.
        mine = [] if casting.keeps_autocast else [d for d in casting.devices if d in NATIVE]
        scope.saved = save(dict.fromkeys((*casting.native, *thread.mode.config.native, *mine)))
        if casting.enabled:
            scope.patches = autograd_patches
            autograd_patches.hold(scope)
        if not casting.reaches_later:
            _reach_later(casting)
        set_current(casting, [device for device, _, _ in scope.saved.native])
        thread.explicit = explicit
    scope.frame, thread.mode.frame = frame, frame or outer
    return scope


def leave(owner: object) -> None:
    """Close the latest scope of an owner, whose block has ended or whose model has run, and restore the outer state."""
    if close(owner):
        if not thread.open and (sessions or thread.session is not None):
            join_session()
    elif thread.traced:  # compiled code entered the scope before a graph break
        leave_traced()


def active_casting() -> OpCasting | None:
    """Return the current casting of this thread, or None if nothing is cast."""
    current = thread.mode.config
    return current if isinstance(current, OpCasting) and current.enabled else None


def disable_casts() -> AbstractContextManager[Any]:
    """Return a context manager or decorator that turns op casting off in this thread; it may be nested."""
    return OpCasting(None, enabled=False)


# ---- sessions of the process


class CastingSession:
    """Op casting in the whole process outside models, as Apex has it at O1 and for its handle.

    Args:
        casting: the casting of ops.
        owners: models and optimizers, to which the session keeps weak references. The session is over when Python has
            freed all of them; a session without owners lasts until ``end_session``.
    """

    def __init__(self, casting: CastingConfig, owners: Iterable[object] = ()) -> None:
        self.casting = casting
        self.owners = weakref.WeakSet(list(owners) or [self])

    def is_over(self) -> bool:
        """True if Python has freed all owners, or ``end_session`` has removed them."""
        return not self.owners

    def leave(self) -> None:
        """Switch this thread to the next session, or to no casting, in an op that found this session over.

        The mode is running the op, so torch pushes it again after the op and it cannot be removed here. A user's
        ``torch.autocast`` block around the op owns native autocast, which therefore remains as it is. ``join_session``
        does the rest when no op runs.
        """
        following = next((session for session in reversed(sessions) if not session.is_over()), None)
        if following is not None and not in_autocast():
            _join(following, in_op=True)
            return
        set_current(NOTHING, (), in_op=True)
        if thread.outer is not None and not in_autocast():
            set_native(thread.outer.native)


sessions: list[CastingSession] = []
"""The sessions that have not been found to be over, the latest last."""


def _latest_session() -> CastingSession | None:
    """Return the latest session that is not over, or None; sessions that are over release torch's functions."""
    for session in [session for session in sessions if session.is_over()]:
        if session in sessions:
            sessions.remove(session)
        autograd_patches.release(session)
    return sessions[-1] if sessions else None


def session_casting() -> CastingConfig | None:
    """Return the casting of the latest session, or None."""
    return getattr(_latest_session(), "casting", None)


def begin_session(casting: OpCasting, owners: Iterable[object] = ()) -> None:
    """Cast ops in the whole process from now on: in this thread at once, in other threads when they run an O1 model.

    Args:
        casting: the casting. The latest session decides, and a session that casts takes precedence over sessions that
            do not.
        owners: see ``CastingSession``.
    """
    session = CastingSession(casting, owners)
    if casting.enabled:
        autograd_patches.hold(session)
    sessions.insert(len(sessions) if casting.enabled else 0, session)
    join_session()


def keep_session(casting: OpCasting, owner: object) -> None:
    """Add an owner to the session with this very casting, unless the session is over."""
    for session in sessions:
        if session.casting is casting and not session.is_over():
            session.owners.add(owner)


def end_session(casting: OpCasting | None = None) -> None:
    """End the session with this very casting, or all sessions; the previous session becomes current again."""
    for session in sessions:
        if casting in (None, session.casting):
            session.owners.clear()
    join_session()


def deactivate() -> None:
    """End every session of the process, and restore the state that this thread had before it joined one.

    Models initialized at O1 still cast the ops of their ``forward``; ops outside them are no longer cast.
    """
    end_session()


def moved_to(device_type: str, casting: OpCasting) -> OpCasting:
    """Return a casting that also covers a device type, for a model moved there; a session with it switches as well."""
    new = OpCasting(**{**casting.settings, "devices": {*casting.devices, device_type}})
    for session in sessions:
        if session.casting is casting:
            session.casting = new
    join_session()
    return new


def join_session() -> None:
    """Make the casting of the latest session current in this thread; every O1 model calls this before its forward.

    Within a scope nothing changes: the thread joins when it leaves the scope.
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
        return  # the mode is running an op, after which torch pushes it again
    if thread.session is not None and thread.session.is_over() and in_autocast():
        return  # the user's torch.autocast block owns native autocast until it ends
    if latest is not None:
        _join(latest)
    elif thread.outer is not None:
        restore(thread.outer)
        thread.session = thread.outer = None


def _join(session: CastingSession, *, in_op: bool = False) -> None:
    """Make the casting of a session current in this thread; see ``set_current`` for ``in_op``."""
    native = session.casting.native
    if not session.casting.reaches_later:
        _reach_later(session.casting)
    outer = thread.outer = thread.outer or save(native)
    set_native(outer.native)
    saved_devices = [device for device, _, _ in outer.native]
    outer.native.extend(save(device for device in native if device not in saved_devices).native)
    set_current(session.casting, native, session, in_op=in_op)
    thread.session = session


# ---- torch functions that are replaced while any thread casts


def _uncast(run_backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap autograd's engine so that it runs without casts: the forward pass chose the dtypes of its ops."""

    @functools.wraps(run_backward)
    def uncast(*args: Any, **kwargs: Any) -> Any:
        _latest_session()
        clear_cache()
        # The scope is for Python code that autograd calls: users' autograd functions and hooks. If nothing is cast, a
        # traced scope would change native autocast, which Dynamo refuses.
        idle = torch.compiler.is_compiling() and active_casting() is None
        with nullcontext() if idle else _ONLY_RETRIES:
            return run_backward(*args, **kwargs)

    return uncast


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
    """Turn casts off for the step of any optimizer, and bind its closure to the casting that is current now.

    Do not call ``_latest_session`` here: it may remove this hook while torch iterates over the hooks.
    """
    if torch.compiler.is_dynamo_compiling() or active_casting() is None:
        return None
    args = tuple(_remember(each) if callable(each) else each for each in args)
    if kwargs.get("closure") is not None:
        kwargs = {**kwargs, "closure": _remember(kwargs["closure"])}
    # Torch does not call `_after_step` if the step fails; the frame tells `close_interrupted` that it has ended.
    enter(NO_CASTING, optimizer, sys._getframe(1), explicit=True)
    return args, kwargs


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Restore the casting, and clear cached weights: a fused step updates weights without changing their version."""
    if not torch.compiler.is_dynamo_compiling():
        close(optimizer)
        clear_cache()


def _remember(function: Callable[..., Any]) -> Callable[..., Any]:
    """Bind a function to the casting that is current now, for a checkpoint that recomputes it later."""
    casting: Any = thread.mode.config
    explicit = thread.explicit
    if casting is NOTHING:
        return function
    native = save(casting.native).native

    @functools.wraps(function, updated=())
    def remembering(*args: Any, **kwargs: Any) -> Any:
        if thread.mode.config is casting and (not thread.mode.is_needed or thread.mode in function_modes()):
            return function(*args, **kwargs)
        with casting:
            thread.explicit = explicit
            set_native(native)  # user code may have changed native autocast within the scope
            return function(*args, **kwargs)

    return remembering


autograd_patches = Patches(
    {
        ("torch.autograd", "_engine_run_backward"): _uncast,
        # Otherwise a compiled backward pass runs under the autocast of its forward pass.
        ("torch._functorch.config", "backward_pass_autocast"): lambda own: "off",
    },
    {register_optimizer_step_pre_hook: _before_step, register_optimizer_step_post_hook: _after_step},
)
"""Torch's functions for backward passes and steps, which run without casts; held while ops are cast."""

checkpoint_patches = Patches(
    {
        ("torch.utils.checkpoint", "_checkpoint_without_reentrant_generator"): changing_first(_remember),
        ("torch.autograd.function:Function", "apply"): functools.partial(with_inputs_cast, _remember, autograd_patches),
        ("torch.nn.parallel.data_parallel", "parallel_apply"): changing_first(lambda ms: [_remember(m) for m in ms]),
    }
)
"""Torch's functions that run user code later or in another thread, and now bind it to the current casting. A casting
that was current once holds these replacements as long as it exists, because a model may begin to use checkpoints in any
pass, and installing them in each pass would cost time."""


def _reach_later(casting: CastingConfig) -> None:
    """Make checkpoints and other threads follow a casting for as long as the casting exists."""
    casting.reaches_later = True
    checkpoint_patches.hold_while(casting)
