"""Which dtype each op computes in, for a block, a model or the whole process: native ``torch.autocast`` where torch
has it, and on top of it a function mode where the op lists differ, or where products are emulated.

What is in force in a thread is one ``OpCasting``. Three things put it there, and the innermost decides:

- the process: the latest session of O1 (``sessions``), outside of every model;
- a model that was brought up at a level, while its ``forward`` runs (``enter_model``, ``leave_model``);
- the user, by an explicit scope (``with OpCasting(...)``): a model inside computes as the scope says.

A thread has one mode. Entering a scope changes what the mode does, and leaving puts back what was before, wherever the
mode is on torch's stack.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

import torch

from ..core.oplists.tables import NATIVE
from . import dynamo, torch_patches, weight_copies
from .config import CastingConfig
from .dispatch import CastMode, is_installed, set_function_modes, uninstall
from .thread_state import Scope, in_force, put_in_force, restore, thread
from .weight_cache import clear_in_all_threads

__all__ = [
    "NO_CASTING",
    "OpCasting",
    "active_casting",
    "clear_cache",
    "clear_casts",
    "disable_casts",
    "enter_model",
    "join_process",
    "leave_model",
    "patch_torch",
    "set_process_casting",
    "thread_mode",
]


F = TypeVar("F", bound=Callable[..., Any])


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

_process: OpCasting | None = None


# ---- scopes of one thread


def _sessions_wait(function: F) -> F:
    """Mark a function that changes what is in force: a session that ends while it runs changes this thread later."""

    @functools.wraps(function)
    def marked(*args: Any, **kwargs: Any) -> Any:
        thread.changing += 1
        try:
            return function(*args, **kwargs)
        finally:
            thread.changing -= 1

    return marked  # type: ignore[return-value]


@_sessions_wait
def _enter(casting: CastingConfig, *, explicit: bool, owner: object, frame: FrameType | None = None) -> None:
    _close_interrupted()
    scope = Scope(explicit, owner, frame)
    if explicit or not (thread.explicit or (in_force(casting) and not torch.compiler.is_exporting())):
        _begin(scope, casting)
        thread.explicit = explicit
    thread.open.append(scope)


def _begin(scope: Scope, casting: CastingConfig) -> None:
    outer = () if thread.current is None else thread.current.native
    # A torch.autocast of the user's around this is turned off, but for models that have no casts of their own.
    mine = [] if casting.lenient else [d for d in casting.devices if d in NATIVE]
    scope.save(dict.fromkeys((*casting.native, *outer, *mine)))
    if not casting.inert:
        scope.patches_torch = True
        patch_torch()
    if scope.traced is not None:
        set_function_modes(dynamo.without_ours(scope.traced))
    put_in_force(casting, [device for device, _, _ in scope.native])


def _is_open(owner: object) -> bool:
    return any(scope.owner is owner for scope in thread.open)


@_sessions_wait
def _leave(owner: object) -> None:
    """Close the latest scope of an owner, and those that were opened inside of it and not closed."""
    if _is_open(owner):
        while _close_latest().owner is not owner:
            pass
        if not thread.open:
            if thread.process is None:
                clear_cache()
            join_process()


def _close_latest() -> Scope:
    scope = thread.open.pop()
    if scope.restores:
        if scope.patches_torch:
            torch_patches.release()
        restore(scope)
        thread.explicit = next((each.explicit for each in reversed(thread.open) if each.restores), False)
    if isinstance(scope.owner, torch.optim.Optimizer):
        torch_patches.step_ends()
    return scope


def enter_model(casting: OpCasting, owner: object, frame: FrameType, *, explicit: bool = False) -> None:
    """Put the casting of a model's level in force while the model runs, unless an explicit scope is around it.

    Args:
        casting: the model's; one that is not enabled casts nothing, and may emulate.
        owner: who will leave again.
        frame: of the call of the model.
        explicit: whether it wins over explicit scopes around it.
    """
    if casting.enabled:
        join_process()
    _enter(casting, explicit=explicit, owner=owner, frame=frame)


def leave_model(owner: object) -> None:
    """Put back what was in force before ``enter_model``: the model has run, or failed."""
    if _is_open(owner):
        _leave(owner)
    elif thread.traced:  # it was entered in compiled code, before a graph break
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
    """The casting in force in this thread, or None if nothing is cast."""
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


# ---- the casting of the process


def set_process_casting(casting: OpCasting | None, *, at_once: bool = True) -> None:
    """Cast by this outside of models: in this thread ``at_once``, in others when they run a model."""
    global _process
    _process = casting
    if at_once and not thread.changing:  # the garbage collector may be who calls
        join_process()


def join_process() -> None:
    """Put the casting of the process in force in this thread: every O1 model calls this before its forward.

    Inside of a scope nothing changes; the thread joins when the scope is left.
    """
    if not torch.compiler.is_dynamo_compiling():
        _join()


@_sessions_wait
def _join() -> None:
    _close_interrupted()
    if not torch.is_grad_enabled():
        thread.cache.clear()
    if thread.leftover and is_installed(thread.mode):
        uninstall(thread.mode)
        thread.leftover = False
    process = _process
    if thread.process is process or thread.open:
        return
    clear_cache()
    if thread.before is not None:
        # A session may have ended while the mode runs an op. torch then puts the mode back on the stack.
        leftover = bool(thread.mode.table) and not is_installed(thread.mode)
        restore(thread.before)
        thread.leftover, thread.before = leftover, None
    thread.process = process
    thread.cache.in_session = process is not None
    if process is not None:
        thread.before = Scope(explicit=False)
        thread.before.save(process.native)
        put_in_force(process, process.native)


# ---- functions of torch that are wrapped while any casting is in force


def patch_torch() -> None:
    """Count one more casting that is in force; ``torch_patches.release`` counts it off."""
    torch_patches.hold(_uncast, _remember, _before_step, _after_step)


def _uncast(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass without casts: its ops have the dtypes that forward chose."""

    @functools.wraps(backward)
    def uncast(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return backward(*args, **kwargs)
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
    """A step of any optimizer runs without casts, and a closure given to it under those that are in force now."""
    if torch.compiler.is_dynamo_compiling():
        return None
    weight_copies.before_step(optimizer)
    if active_casting() is None:
        return None
    args = tuple(_remember(each) if callable(each) else each for each in args)
    if kwargs.get("closure") is not None:
        kwargs = {**kwargs, "closure": _remember(kwargs["closure"])}
    torch_patches.step_begins()
    _enter(NO_CASTING, explicit=True, owner=optimizer, frame=sys._getframe(1))  # a step that fails has no second hook
    return args, kwargs


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Put back the casts, and forget copies: a fused step writes to weights without a new version."""
    if not torch.compiler.is_dynamo_compiling() and _is_open(optimizer):
        _leave(optimizer)
    weight_copies.after_step(optimizer)
    clear_in_all_threads()
    torch.clear_autocast_cache()


def _remember(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs under the casting that is in force now, for a checkpoint that recomputes it later."""
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
