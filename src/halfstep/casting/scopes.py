"""Which dtype each op computes in, scoped, for a model or for the whole process: native ``torch.autocast`` where torch
has it, and on top of it a function mode where the op lists say otherwise, or where products are emulated.

What is in force in a thread is one ``OpCasting``. Three things put it there, and the innermost decides:

- the process: the latest session of O1 (``sessions``), outside of every model;
- a model that was brought up at a level, while its ``forward`` runs (``enter_model``, ``leave_model``);
- the user, by an explicit scope (``with OpCasting(...)``): a model inside computes as the scope says.

A thread has one mode; entering changes what it does, leaving restores what was before, wherever the mode stands on
torch's stack. The tables are in ``mode``, what is done to a call in ``rules``; for ``torch.compile`` see ``compiled``.
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
from . import compiled
from . import torch_patches as guards
from . import weight_copies as copies
from .in_force import Open, installed, put, restore
from .in_force import thread as _thread
from .mode import CastMode, uninstall
from .spec import CastingSpec
from .weight_cache import forget_in_all_threads

__all__ = [
    "PLAIN",
    "OpCasting",
    "active",
    "clear_cache",
    "disable_casts",
    "ensure_thread",
    "enter_model",
    "enter_traced_model",
    "follow",
    "hold",
    "leave_model",
    "leave_traced_model",
    "mode_of_thread",
]


F = TypeVar("F", bound=Callable[..., Any])


class OpCasting(CastingSpec):
    """What is done to ops, and a scope in which it is done; thread-local, re-entrant.

    An inner scope replaces the outer one. Backward passes inside are not cast, and activation checkpoints made inside
    recompute under the same lists.
    """

    def __enter__(self) -> OpCasting:
        if torch.compiler.is_dynamo_compiling():
            compiled.enter_scope(self.key, _thread)
        else:
            _enter(self, explicit=True, owner=self)
        return self

    def __exit__(self, *exc: object) -> None:
        if torch.compiler.is_dynamo_compiling():
            compiled.leave(_thread)
        else:
            _leave(self)


PLAIN = OpCasting(None, enabled=False, emulate=False, devices=NATIVE)
"""A scope without casts and emulation, in which the function mode does nothing."""


_process: OpCasting | None = None


# ---- scopes of one thread


def _undisturbed(function: F) -> F:
    """A function that changes what is in force; a session that ends meanwhile waits for the next."""

    @functools.wraps(function)
    def undisturbed(*args: Any, **kwargs: Any) -> Any:
        _thread.busy += 1
        try:
            return function(*args, **kwargs)
        finally:
            _thread.busy -= 1

    return undisturbed  # type: ignore[return-value]


@_undisturbed
def _enter(casting: OpCasting, *, explicit: bool, owner: object, frame: FrameType | None = None) -> None:
    _drop_interrupted()
    scope = Open(explicit, owner, frame)
    if explicit or not (_thread.explicit or _in_force(casting)):
        _begin(scope, casting)
        _thread.explicit = explicit
    _thread.open.append(scope)


def _in_force(casting: OpCasting) -> bool:
    """Whether a thread does what a casting says already."""
    if torch.compiler.is_exporting() or not (_thread.key == casting.key or (casting.inert and not _thread.key)):
        return False
    if casting.lenient:
        return True
    native = [d for d in casting.devices if d in NATIVE and torch.is_autocast_enabled(d)]
    return native == list(casting.native) and all(torch.get_autocast_dtype(d) is casting.dtype for d in native)


def _begin(scope: Open, casting: OpCasting) -> None:
    outer = () if _thread.current is None else _thread.current.native
    # A plain torch.autocast around it is not in force inside, but for models that have no casts of their own.
    mine = [] if casting.lenient else [d for d in casting.devices if d in NATIVE]
    scope.capture(dict.fromkeys((*casting.native, *outer, *mine)))
    if not casting.inert:
        scope.held = True
        hold()
    if scope.traced is not None:
        compiled.put_stack(compiled.others(scope.traced))
    put(casting, [device for device, _, _ in scope.native])


@_undisturbed
def _leave(owner: object) -> None:
    """End the latest scope of an owner, and with it what began inside of it and did not end."""
    if any(scope.owner is owner for scope in _thread.open):
        while _end_latest().owner is not owner:
            pass
        if not _thread.open:
            if _thread.process is None:
                clear_cache()
            ensure_thread()


def _end_latest() -> Open:
    scope = _thread.open.pop()
    if scope.restores:
        if scope.held:
            guards.release()
        restore(scope)
        _thread.explicit = next((each.explicit for each in reversed(_thread.open) if each.restores), False)
    return scope


def enter_model(casting: OpCasting, owner: object, frame: FrameType, *, explicit: bool = False) -> None:
    """While a model runs, what its level says is in force, unless an explicit scope around it says otherwise.

    Args:
        casting: the model's; one that is not enabled casts nothing, and may emulate.
        owner: who will leave again.
        frame: of the call of the model.
        explicit: whether it has its way over the scopes around it.
    """
    if casting.enabled:
        ensure_thread()
    _enter(casting, explicit=explicit, owner=owner, frame=frame)


def leave_model(owner: object) -> None:
    """The model that entered last has run, or failed."""
    if any(scope.owner is owner for scope in _thread.open):
        _leave(owner)
    elif _thread.traced:  # it was entered in compiled code, before a graph break
        compiled.leave(_thread)


def enter_traced_model(casting: OpCasting, *, explicit: bool = False) -> None:
    """``enter_model`` for Dynamo."""
    if explicit:
        compiled.enter_scope(casting.key, _thread)
    else:
        compiled.enter_model(casting.key, casting.inert, _thread)


def leave_traced_model() -> None:
    """``leave_model`` for Dynamo."""
    compiled.leave(_thread)


def _drop_interrupted() -> None:
    """A KeyboardInterrupt ends a model's forward without its hooks; what it left in force ends here."""
    while _thread.open and not _runs(_thread.open[-1]):
        _end_latest()
    if _thread.traced and not compiled.is_running():
        compiled.abandon(_thread)


def _runs(scope: Open) -> bool:
    """Whether the call that opened a scope is still under way. A ``with`` block always is."""
    if scope.frame is None:
        return True
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not scope.frame:
        frame = frame.f_back
    return frame is not None


def active() -> OpCasting | None:
    """The casting in force in this thread, or None if nothing is cast."""
    current = _thread.current
    return current if current is not None and current.enabled else None


def mode_of_thread() -> CastMode:
    """The mode that casts in this thread, whether or not it is on the stack."""
    return _thread.mode


@contextmanager
def disable_casts() -> Iterator[None]:
    """A scope without op casting, in this thread; exceptions and nesting leave it as they found it."""
    with OpCasting(None, enabled=False):
        yield


def clear_cache() -> None:
    """Forget the 16-bit copies of fp32 parameters."""
    _thread.cache.clear()
    torch.clear_autocast_cache()


def follow(casting: OpCasting | None, *, at_once: bool = True) -> None:
    """Cast by this outside of models: in this thread ``at_once``, in others when they run a model."""
    global _process
    _process = casting
    if at_once and not _thread.busy:  # the garbage collector may be who calls
        ensure_thread()


def ensure_thread() -> None:
    """Bring this thread in line with the process: every O1 model calls it before its forward.

    Inside a scope the scope has its way, and the thread joins when it is left.
    """
    if not torch.compiler.is_dynamo_compiling():
        _join()


@_undisturbed
def _join() -> None:
    _drop_interrupted()
    if not torch.is_grad_enabled():
        _thread.cache.clear()
    if _thread.leftover and installed():
        uninstall(_thread.mode)
        _thread.leftover = False
    process = _process
    if _thread.process is process or _thread.open:
        return
    clear_cache()
    if _thread.before is not None:
        # Inside of the mode's own call of an op, which puts it back on the stack, a session may have ended.
        leftover = bool(_thread.mode.table) and not installed()
        restore(_thread.before)
        _thread.leftover, _thread.before = leftover, None
    _thread.process = process
    if process is not None:
        _thread.before = Open(explicit=False)
        _thread.before.capture(process.native)
        put(process, process.native)


# ---- what is made of functions of torch while anything is in force


def hold() -> None:
    """Count one more that is in force; ``guards.release`` counts it off."""
    guards.hold(_uncast, _remember, _stepped)


def _uncast(own: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass runs without casts: its ops have the dtypes that forward chose."""
    own = copies.adding_in_fp32(own)

    @functools.wraps(own)
    def uncast(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or active() is None:
            return own(*args, **kwargs)
        clear_cache()
        with PLAIN:
            return own(*args, **kwargs)

    return uncast


def _stepped() -> None:
    """An optimizer has stepped. Fused ones write to weights without a new version, and every thread may have casts."""
    forget_in_all_threads()
    torch.clear_autocast_cache()


def _remember(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs under what is in force now, for a checkpoint that recomputes it later."""
    casting, explicit = _thread.current, _thread.explicit
    if casting is None:
        return function
    native = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in casting.native]

    @functools.wraps(function, updated=())
    def remembering(*args: Any, **kwargs: Any) -> Any:
        if _thread.current is casting:
            return function(*args, **kwargs)
        owner = object()
        _enter(casting, explicit=True, owner=owner)
        _thread.explicit = explicit
        for device, enabled, dtype in native:  # the user may have turned it off, or to another dtype, inside
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        try:
            return function(*args, **kwargs)
        finally:
            _leave(owner)

    return remembering
