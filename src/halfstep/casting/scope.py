"""Who casts in this thread: native ``torch.autocast`` where torch has it, and on top of it a function mode where the op
lists differ, or where products are emulated.

One casting (``OpCasting``) is current in a thread. Three things make it so, and the innermost decides:

- a session of O1: the latest one of the process that is not over, outside of every model;
- a model that was brought up at a level, while its ``forward`` runs (``enter_model``, ``leave_model``);
- the user, by an explicit scope (``with OpCasting(...)``): a model inside computes as the scope says.

A session is over when its models and optimizers are gone. Nothing happens at that moment: the next op or scope asks,
and goes on without it.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from ..core.oplists.tables import NATIVE
from . import dynamo, weight_copies
from .config import CastingConfig
from .current import Scope, is_current, restore, set_current, thread
from .dispatch import CastMode, is_installed, set_function_modes
from .sessions import Session, add, in_autocast, join, latest_session, leave_sessions, sessions
from .torch_patches import around_casts, around_recomputation, changing_first, checkpoint_function
from .weight_cache import clear_in_all_threads

__all__ = [
    "NO_CASTING",
    "OpCasting",
    "Session",
    "active_casting",
    "begin_session",
    "clear_cache",
    "clear_casts",
    "deactivate",
    "disable_casts",
    "end_session",
    "enter_model",
    "join_session",
    "keep_session",
    "leave_model",
    "moved_to",
    "session_casting",
    "thread_mode",
]


class OpCasting(CastingConfig):
    """What is done to ops, and a scope in which it is done; thread-local, re-entrant.

    An inner scope replaces the outer one. Backward passes inside are not cast, and activation checkpoints made inside
    recompute under the same lists.
    """

    def __enter__(self) -> OpCasting:
        if torch.compiler.is_dynamo_compiling():
            dynamo.enter_scope(self)
        else:
            _enter(self, explicit=True, owner=self)
        return self

    def __exit__(self, *exc: object) -> None:
        if torch.compiler.is_dynamo_compiling():
            dynamo.leave()
        else:
            _leave(self)


NO_CASTING = OpCasting(None, enabled=False, emulate=False, devices=NATIVE)
"""A scope without casts and emulation, in which the function mode does nothing."""


# ---- scopes of one thread


def _enter(casting: CastingConfig, *, explicit: bool, owner: object, frame: FrameType | None = None) -> None:
    if thread.open or thread.traced:
        _close_interrupted()
    scope = Scope(explicit, owner, frame)
    if explicit or not (thread.explicit or (is_current(casting) and not torch.compiler.is_exporting())):
        _begin(scope, casting)
        thread.explicit = explicit
    thread.open.append(scope)


def _begin(scope: Scope, casting: CastingConfig) -> None:
    outer = () if thread.current is None else thread.current.native
    # A torch.autocast of the user's around this is turned off, but for models that have no casts of their own.
    mine = [] if casting.keeps_autocast else [d for d in casting.devices if d in NATIVE]
    scope.save(dict.fromkeys((*casting.native, *outer, *mine)))
    scope.patches = [*([around_casts] if casting.enabled else []), *([] if casting.is_noop else [around_recomputation])]
    for patches in scope.patches:
        patches.hold(scope)
    if scope.traced is not None:
        set_function_modes(dynamo.without_ours(scope.traced))
    set_current(casting, [device for device, _, _ in scope.native])


def _leave(owner: object) -> bool:
    """Close the latest scope of an owner, if there is one; the thread goes on with the one around, or a session."""
    closed = _close(owner)
    if closed and not thread.open:
        if thread.session is None:
            thread.cache.clear()
            torch.clear_autocast_cache()
        join_session()
    return closed


def _close(owner: object) -> bool:
    """Close the latest scope of an owner, and those that were opened inside of it and not closed, if there is one."""
    if owner not in [scope.owner for scope in thread.open]:
        return False
    while _close_latest().owner is not owner:
        pass
    return True


def _close_latest() -> Scope:
    scope = thread.open.pop()
    if scope.restores:
        for patches in scope.patches:
            patches.release(scope)
        restore(scope)
        thread.explicit = next((each.explicit for each in reversed(thread.open) if each.restores), False)
    return scope


def enter_model(casting: OpCasting, owner: object, frame: FrameType, *, explicit: bool = False) -> None:
    """Make the casting of a model's level current while the model runs, unless an explicit scope is around it.

    Args:
        casting: the model's; one that is not enabled casts nothing, and may emulate.
        owner: who will leave again.
        frame: of the call of the model.
        explicit: whether it wins over explicit scopes around it.
    """
    if casting.enabled:
        join_session()
    _enter(casting, explicit=explicit, owner=owner, frame=frame)


def leave_model(owner: object) -> None:
    """Put back what was current before ``enter_model``: the model has run, or failed."""
    if not _leave(owner) and thread.traced:  # it was entered in compiled code, before a graph break
        dynamo.leave()


def _close_interrupted() -> None:
    """Close the scopes of calls whose second hooks did not run: of a KeyboardInterrupt, or a step that failed."""
    while thread.open and not _is_running(thread.open[-1]):
        _close_latest()
    if thread.traced and not dynamo.is_running():
        dynamo.abandon()


def _is_running(scope: Scope) -> bool:
    """Whether the call that opened a scope is still running. A ``with`` block always is."""
    if scope.frame is None:
        return True
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not scope.frame:
        frame = frame.f_back
    return frame is not None


def active_casting() -> OpCasting | None:
    """The current casting of this thread, or None if nothing is cast."""
    current = thread.current
    return current if isinstance(current, OpCasting) and current.enabled else None


def thread_mode() -> CastMode:
    """The mode that casts in this thread, whether or not it is on the stack."""
    return thread.mode


@contextmanager
def disable_casts() -> Iterator[None]:
    """A scope without op casting, in this thread; exceptions and nesting leave it as they found it."""
    with OpCasting(None, enabled=False):
        yield


def clear_cache() -> None:
    """Forget the 16-bit casts of this iteration."""
    thread.cache.clear()
    torch.clear_autocast_cache()


def clear_casts() -> None:
    """Cast every weight anew at its next use: call it after a write to weights that torch does not know of.

    ::

        for p, average in zip(model.parameters(), averages):
            p.data.copy_(average)
        amp.clear_casts()

    At O1 and inside of ``amp.auto_cast`` a weight is cast once, and the cast is used until the next backward pass or
    step; with ``keep_casts=True`` until the weight changes. Writes by optimizers, by ``load_state_dict`` and in place
    are noticed, and so is other memory. A write through ``.data``, through a detached tensor or an array that shares
    the memory, or by another process is not. The call is cheap, and holds for every thread.
    """
    clear_in_all_threads()
    torch.clear_autocast_cache()
    weight_copies.clear_kept()


# ---- sessions of the process


def session_casting() -> CastingConfig | None:
    """The casting of the latest session, or None."""
    session = latest_session()
    return None if session is None else session.casting


def begin_session(casting: OpCasting, owners: Iterable[object] = ()) -> None:
    """Cast ops in the whole process from now on: in this thread at once, in others when they run an O1 model.

    Args:
        casting: what to do; the latest session decides.
        owners: see ``Session``.
    """
    add(Session(casting, owners))
    join_session()


def keep_session(casting: OpCasting, owner: object) -> None:
    """Let the session with this very casting last as long as an owner more, if it is not over."""
    for session in sessions:
        if session.casting is casting and not session.is_over():
            session.owners = [*session.owners, weakref.ref(owner)]


def end_session(casting: OpCasting) -> None:
    """End the session with this very casting, if it is not over; the one before is current again."""
    for session in sessions:
        if session.casting is casting:
            session.owners = []
    join_session()


def deactivate() -> None:
    """End all casting in the whole process; this thread gets back what it had before.

    Models that were brought up at O1 still compute by their level; what is outside of them is not cast any more.
    """
    for session in sessions:
        session.owners = []
    join_session()


def moved_to(device_type: str, casting: OpCasting) -> OpCasting:
    """The casting of a model that has moved to another type of device; a session with this casting follows."""
    new = OpCasting(**{**casting.settings, "devices": {*casting.devices, device_type}})
    for place, session in enumerate(list(sessions)):
        if session.casting is casting:
            moved = Session(new)
            moved.owners, session.owners = session.owners, []
            add(moved, at=place + 1)
    join_session()
    return new


def join_session() -> None:
    """Make the casting of the latest session current in this thread: every O1 model calls this before its forward.

    Inside of a scope nothing changes; the thread joins when the scope is left.
    """
    if torch.compiler.is_dynamo_compiling():
        return
    if thread.open or thread.traced:
        _close_interrupted()
    if not torch.is_grad_enabled():
        thread.cache.clear()
    latest = latest_session() if sessions else None
    if thread.session is latest or thread.open:
        return
    if thread.mode.is_needed and not is_installed(thread.mode):
        return  # the mode runs an op, after which it is on torch's stack again
    if thread.session is not None and thread.session.is_over() and in_autocast():
        return  # native autocast is the user's until that block ends
    torch.clear_autocast_cache()
    if latest is None:
        leave_sessions()
    else:
        join(latest)


# ---- functions of torch that have wrappers while a casting is current anywhere


def _uncast(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass without casts: its ops have the dtypes that forward chose."""

    @functools.wraps(backward)
    def uncast(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return backward(*args, **kwargs)
        latest_session()
        weight_copies.widen_gradients()
        try:
            if active_casting() is None:
                return backward(*args, **kwargs)
            clear_cache()
            with NO_CASTING:
                return backward(*args, **kwargs)
        except BaseException:
            weight_copies.drop_failed_pass()
            raise

    return uncast


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
    """A step of any optimizer runs without casts, and a closure given to it under those that are current now.

    Nothing in here asks whether a session is over: torch goes through its hooks, and this is one that would be removed.
    """
    if torch.compiler.is_dynamo_compiling():
        return None
    weight_copies.before_step(optimizer)
    if active_casting() is None:
        return None
    args = tuple(_remember(each) if callable(each) else each for each in args)
    if kwargs.get("closure") is not None:
        kwargs = {**kwargs, "closure": _remember(kwargs["closure"])}
    _enter(NO_CASTING, explicit=True, owner=optimizer, frame=sys._getframe(1))  # a step that fails has no second hook
    return args, kwargs


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Put back the casts, and forget those of weights: a fused step writes to weights without a new version."""
    if not torch.compiler.is_dynamo_compiling():
        _close(optimizer)
    weight_copies.after_step(optimizer)
    clear_in_all_threads()
    torch.clear_autocast_cache()


def _remember(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs under the casting that is current now, for a checkpoint that recomputes it later."""
    casting, explicit = thread.current, thread.explicit
    if casting is None:
        return function
    native = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in casting.native]

    @functools.wraps(function, updated=())
    def remembering(*args: Any, **kwargs: Any) -> Any:
        if thread.current is casting:
            return function(*args, **kwargs)
        owner = object()
        _enter(casting, explicit=True, owner=owner)
        thread.explicit = explicit
        for device, enabled, dtype in native:  # the user may have turned it off, or to another dtype, inside
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        try:
            return function(*args, **kwargs)
        finally:
            _leave(owner)

    return remembering


around_casts.wraps = {
    ("torch.autograd", "backward"): _uncast,
    ("torch.autograd", "grad"): _uncast,
    # torch.compile would cast in backward passes what it casts in forward.
    ("torch._functorch.config", "backward_pass_autocast"): lambda own: "off",
}
around_casts.step_hooks = (_before_step, _after_step)
around_recomputation.wraps = {
    ("torch.utils.checkpoint", "_checkpoint_without_reentrant_generator"): changing_first(_remember),
    ("torch.utils.checkpoint", "CheckpointFunction"): checkpoint_function(_remember),
    # It runs replicas in threads of its own.
    ("torch.nn.parallel.data_parallel", "parallel_apply"): changing_first(lambda ms: [_remember(m) for m in ms]),
}
