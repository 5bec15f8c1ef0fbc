"""Which dtype each op computes in, scoped, for a model or for the whole process: native ``torch.autocast`` where torch
has it, and on top of it a function mode where the op lists say otherwise, or where products are emulated.

What is in force in a thread is one ``OpCasting``. Three things put it there, and the innermost decides:

- the process: the latest session of O1 (``activate``), outside of every model;
- a model that was brought up at a level, while its ``forward`` runs (``enter_model``, ``leave_model``);
- the user, by an explicit scope (``with OpCasting(...)``): a model inside computes as the scope says.

A thread has one mode; entering changes what it does, leaving restores what was before, wherever the mode stands on
torch's stack. The tables are in ``mode``, what is done to a call in ``rules``; for ``torch.compile`` see ``compiled``.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

import torch

from ...core.hardware import accelerator
from ...core.oplists import OpLists
from ...core.oplists.tables import NATIVE
from . import compiled, copies, guards
from .cache import WeightCache, forget_in_all_threads
from .emulation import Emulate, EmulatedKinds, emulated_kinds
from .mode import CastMode, build_table, install, uninstall

__all__ = [
    "PLAIN",
    "OpCasting",
    "activate",
    "active",
    "clear_cache",
    "deactivate",
    "disable_casts",
    "ensure_thread",
    "enter_model",
    "enter_traced_model",
    "leave_model",
    "leave_traced_model",
    "mode_of_thread",
    "moved",
    "process_casting",
    "retire",
]


F = TypeVar("F", bound=Callable[..., Any])
_EVAL_FRAME = os.path.join("torch", "_dynamo", "eval_frame.py")


def present_devices() -> tuple[str, ...]:
    """The types of the devices of this machine."""
    found = accelerator()
    return ("cpu",) if found in (None, "cpu") else ("cpu", found)


@functools.lru_cache(maxsize=64)
def facts_of(
    dtype: torch.dtype | None,
    lists: OpLists,
    enabled: bool,
    cache: bool,
    verbose: bool,
    allow_banned: bool,
    devices: tuple[str, ...],
    emulate: Emulate,
    lenient: bool,
) -> tuple[str, tuple[str, ...], EmulatedKinds]:
    """What follows from the settings of a casting: a key, where native autocast takes part, and what is emulated."""
    key = str((dtype, str(lists), enabled, cache, verbose, allow_banned, devices, emulate, lenient))
    native: tuple[str, ...] = ()
    if enabled and lists.level == "native":
        native = tuple(d for d in devices if torch.amp.is_autocast_available(d))
    elif enabled:
        native = tuple(d for d in devices if d in NATIVE)
    return key, native, emulated_kinds(devices, dtype, emulate)


class OpCasting:
    """What is done to ops: a value, and a scope in which it is done; thread-local, re-entrant.

    An inner scope replaces the outer one. Backward passes inside are not cast, and activation checkpoints made inside
    recompute under the same lists.

    Args:
        dtype: the 16-bit dtype of the ops on the half list. None is for scopes that cast nothing: they emulate both.
        lists: which ops run in which precision.
        enabled: False casts nothing.
        cache: cast each fp32 parameter at most once between two backward passes or calls of ``clear_cache``.
        verbose: log each cast at level INFO of the logger "halfstep".
        allow_banned: run banned ops in fp32 instead of refusing 16-bit inputs.
        devices: types of the devices whose tensors are cast; None means the CPU and the accelerator of this machine.
        emulate: where 16-bit products run in fp32 kernels; see ``emulation.Emulate``.
        lenient: let a plain ``torch.autocast`` around a model be.
    """

    def __init__(
        self,
        dtype: torch.dtype | None,
        lists: OpLists | None = None,
        *,
        enabled: bool = True,
        cache: bool = True,
        verbose: bool = False,
        allow_banned: bool = False,
        devices: Iterable[str] | None = None,
        emulate: Emulate = "auto",
        lenient: bool = False,
    ) -> None:
        if torch.compiler.is_dynamo_compiling():
            self.key = _key_of(dtype, lists, enabled, allow_banned, devices, emulate)
        else:
            self._fill(dtype, lists, enabled, cache, verbose, allow_banned, devices, emulate, lenient)

    def _fill(
        self,
        dtype: torch.dtype | None,
        lists: OpLists | None,
        enabled: bool,
        cache: bool,
        verbose: bool,
        allow_banned: bool,
        devices: Iterable[str] | None,
        emulate: Emulate,
        lenient: bool = False,
    ) -> None:
        self.lenient = lenient
        self.dtype = dtype or torch.bfloat16
        self.lists = lists or OpLists.default()
        self.enabled = enabled
        self.cache = cache
        self.verbose = verbose
        self.allow_banned = allow_banned
        self.devices = present_devices() if devices is None else tuple(sorted(devices))
        self.settings = (dtype, self.lists, enabled, cache, verbose, allow_banned, self.devices, emulate, lenient)
        self.key, self.native, self.emulated = facts_of(*self.settings)
        self.inert = not enabled and not self.emulated
        compiled.known.setdefault(self.key, self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, self.settings  # what is emulated is for the machine to say that reads it

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

    def set_up(self, mode: CastMode, cache: WeightCache | None, *, explicit: bool = False) -> None:
        """Make a mode do this.

        Args:
            mode: the mode.
            cache: where to keep copies of weights.
            explicit: leave nothing to native autocast; see ``build_table``. An exported graph must hold every cast,
                and native autocast leaves no trace in it.
        """
        mode.emulated = self.emulated
        mode.table = build_table(
            self.lists if self.enabled else None,
            self.devices,
            frozenset(kind for _, _, kind in mode.emulated),
            explicit=explicit,
            verbose=self.verbose,
        )
        mode.dtype = self.dtype
        mode.devices = self.devices
        mode.native = self.native
        mode.explicit = explicit
        mode.cache = cache if self.cache else None
        mode.verbose = self.verbose
        mode.allow_banned = self.allow_banned


def _restored(*settings: Any) -> OpCasting:
    casting = OpCasting.__new__(OpCasting)
    casting._fill(*settings)
    return casting


PLAIN = OpCasting(None, enabled=False, emulate=False, devices=NATIVE)
"""A scope without casts and emulation, in which the function mode does nothing."""


def _key_of(
    dtype: torch.dtype | None,
    lists: Any,
    enabled: bool,
    allow_banned: bool,
    devices: Any,
    emulate: Emulate,
) -> str:
    """The key of a casting that traced code makes, whose lists are text there.

    Dynamo calls this and takes the key for a constant.
    """
    chosen = OpLists.parse(lists) if isinstance(lists, str) else lists
    return _restored(dtype, chosen, enabled, True, False, allow_banned, devices, emulate).key


_key_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _Open:
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
        self.current, self.key = _thread.current, _thread.key
        self.native = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices]
        self.native_cache = torch.is_autocast_cache_enabled()
        self.installed = _installed()
        modes = compiled.stack() if _thread.traced else []
        # After a graph break, modes that compiled code has put there are on the stack.
        self.traced = modes if any(isinstance(m, CastMode) and m is not _thread.mode for m in modes) else None


class Thread(threading.local):
    """What is in force in one thread."""

    def __init__(self) -> None:
        self.current: OpCasting | None = None
        self.key = ""  # of what is in force, also in compiled code
        self.explicit = False  # whether the innermost scope is the user's
        self.traced: list[Any] = []  # what compiled code will put back
        self.process: OpCasting | None = None
        self.before: _Open | None = None
        self.open: list[_Open] = []
        self.mode = CastMode()
        self.cache = WeightCache()
        self.leftover = False  # whether the mode is on the stack although nothing needs it
        self.busy = 0  # how many of the functions that change this are under way


_thread = Thread()


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
    scope = _Open(explicit, owner, frame)
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


def _begin(scope: _Open, casting: OpCasting) -> None:
    outer = () if _thread.current is None else _thread.current.native
    # A plain torch.autocast around it is not in force inside, but for models that have no casts of their own.
    mine = [] if casting.lenient else [d for d in casting.devices if d in NATIVE]
    scope.capture(dict.fromkeys((*casting.native, *outer, *mine)))
    if not casting.inert:
        scope.held = True
        guards.hold(_uncast, _remember, _stepped)
    if scope.traced is not None:
        compiled.put_stack(compiled.others(scope.traced))
    _put(casting, [device for device, _, _ in scope.native])


@_undisturbed
def _leave(owner: object) -> None:
    """End the latest scope of an owner, and with it what began inside of it and did not end."""
    if any(scope.owner is owner for scope in _thread.open):
        while _end_latest().owner is not owner:
            pass
        _after_leaving()


def _end_latest() -> _Open:
    scope = _thread.open.pop()
    if scope.restores:
        if scope.held:
            guards.release()
        _restore(scope)
        _thread.explicit = next((each.explicit for each in reversed(_thread.open) if each.restores), False)
    return scope


def _after_leaving() -> None:
    if not _thread.open:
        if _thread.process is None:
            clear_cache()
        ensure_thread()


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
    if _thread.traced and not _runs_compiled():
        compiled.abandon(_thread)


def _runs(scope: _Open) -> bool:
    """Whether the call that opened a scope is still under way. A ``with`` block always is."""
    if scope.frame is None:
        return True
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not scope.frame:
        frame = frame.f_back
    return frame is not None


def _runs_compiled() -> bool:
    """Whether compiled code is under way in this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.endswith(_EVAL_FRAME):
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


# ---- the whole process


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
    guards.hold(_uncast, _remember, _stepped)
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
    new = _restored(*others, {*devices, device_type}, emulate, lenient)
    for session in _sessions:
        if session.casting is casting:
            session.casting = new
    return new


def _owner_gone(session: _Session) -> None:
    session.owners -= 1
    if session.owners == 0:
        _end([session])


def _end(sessions: list[_Session]) -> None:
    """End sessions. The garbage collector may call this at any point, also inside of itself: it never waits."""
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
    if not _thread.busy:
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
    if _thread.leftover and _installed():
        uninstall(_thread.mode)
        _thread.leftover = False
    process = process_casting()
    if _thread.process is process or _thread.open:
        return
    clear_cache()
    if _thread.before is not None:
        # Inside of the mode's own call of an op, which puts it back on the stack, a session may have ended.
        _thread.leftover = bool(_thread.mode.table) and not _installed()
        _restore(_thread.before)
        _thread.before = None
    _thread.process = process
    if process is not None:
        _thread.before = _Open(explicit=False)
        _thread.before.capture(process.native)
        _put(process, process.native)


# ---- what torch is told


def _installed() -> bool:
    """Whether the thread's mode is on the stack; inside its own ``__torch_function__`` it is not."""
    size = torch._C._len_torch_function_stack()
    return any(torch._C._get_function_stack_at(i) is _thread.mode for i in range(size))


def _put(casting: OpCasting, devices: Iterable[str]) -> None:
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
    _thread.current = casting
    _thread.key = "" if casting is None or casting.inert else casting.key
    if casting is None:
        _thread.mode.table = {}
    else:
        casting.set_up(_thread.mode, _thread.cache, explicit=torch.compiler.is_exporting())
    return bool(_thread.mode.table)


def _restore(scope: _Open) -> None:
    for device, enabled, dtype in scope.native:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_cache_enabled(scope.native_cache)
    _set_current(scope.current)
    _thread.key = scope.key
    _place(scope.installed)
    if scope.traced is not None:
        compiled.put_stack(scope.traced)


def _place(wanted: bool) -> None:
    if wanted != _installed():
        (install if wanted else uninstall)(_thread.mode)


# ---- what is made of functions of torch while anything is in force; see guards


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
