"""The casting that is current in each thread, and the torch state that carries it out: native autocast, the function
mode on torch's stack, and torch names that are replaced while ops are cast.

``scope`` decides which casting is current. Two facts are invisible in the code, and a change must keep them:

- Dynamo traces ``is_current``, ``push_traced`` and ``leave_traced`` (``dynamo`` calls them). They may read and write
  attributes of ``thread``, constants and torch's stack of modes, and nothing else: Dynamo could not guard it.
- Frames tell if a scope is still open. Torch does not run the second hook of a call that a KeyboardInterrupt ends, so
  ``close_interrupted`` compares ``OpScope.frame`` with the frames that are running. Every function that opens or
  closes a scope sets ``frame`` to ``ENDED`` and ``CastMode.frame`` to its own frame first, and changes the state in an
  order from which ``close`` can start again, because an interrupt may come between any two lines.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pkgutil import resolve_name
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from ..core.oplists.tables import NATIVE
from ..torch_internals.compiler_compat import exit_autocast
from ..torch_internals.torch_compat import jit_tracing_state
from .config import CastingConfig
from .containers import Made
from .dispatch import CastMode, Plan, SessionEnd, function_modes, place_mode, set_function_modes
from .meeting import call_again
from .rule_table import OpRules, build_table
from .weight_cache import WeightCache

__all__ = [
    "ENDED",
    "OpScope",
    "Patches",
    "ThreadSnapshot",
    "changing_first",
    "clear_cache",
    "close",
    "close_interrupted",
    "in_autocast",
    "is_current",
    "is_recorded",
    "leave_traced",
    "plan_of",
    "push_traced",
    "restore",
    "save",
    "set_current",
    "set_native",
    "thread",
]

_EVAL_FRAME = os.path.join("torch", "_dynamo", "eval_frame.py")

ENDED = (lambda: sys._getframe())()
"""The frame of a call that has ended. A scope has this frame while ``enter`` opens or ``close`` closes it. If ``enter``
or ``close`` no longer runs, ``close_interrupted`` finishes what an interrupt cut short."""

Wrap = Callable[[Any], Any]


class Patches:
    """Replacements of torch names. The first holder installs them, and the last release restores torch's originals.

    Args:
        wraps: for a module or class (``module:Class``) and the name of an attribute, the function that makes the
            replacement from the original. Names that this version of torch lacks are skipped.
        hooks: for a torch function that registers a hook and returns its handle, the hook.
    """

    def __init__(
        self, wraps: Mapping[tuple[str, str], Wrap], hooks: Mapping[Wrap, Any] = types.MappingProxyType({})
    ) -> None:
        # Each name gets the same replacement every time, because Dynamo guards functions by identity.
        self._wraps = {name: functools.cache(wrap) for name, wrap in wraps.items()}
        self._hooks = hooks
        self._holders: set[object] = set()
        self._undo = ExitStack()
        # Any thread may be the first holder or the last. A finalizer that calls `release` may run within `hold` or
        # `release` of the same thread, so the lock is re-entrant.
        self._lock = threading.RLock()

    def hold(self, holder: object) -> None:
        """Install the replacements until this holder and every other holder have released them."""
        with self._lock, ExitStack() as interrupted:
            interrupted.callback(self.release, holder)
            first = not self._holders
            self._holders.add(holder)
            for (module, name), wrap in self._wraps.items() if first else ():
                owner = resolve_name(module)
                original = vars(owner).get(name) if isinstance(owner, type) else getattr(owner, name, None)
                if original is not None:
                    self._undo.callback(setattr, owner, name, original)
                    setattr(owner, name, wrap(original))
            for register, hook in self._hooks.items() if first else ():
                self._undo.callback(register(hook).remove)
            interrupted.pop_all()

    def hold_while(self, owner: object) -> None:
        """Hold the replacements until Python frees an owner; a second call does nothing."""
        if id(owner) not in self._holders:
            # The finalizer comes first, so that an interrupt between the two leaves no holder without it.
            weakref.finalize(owner, self.release, id(owner)).atexit = False
            self.hold(id(owner))

    def release(self, holder: object) -> None:
        """Remove a holder, and restore torch's originals if it was the last; a second call does nothing."""
        with self._lock:
            if self._holders == {holder}:
                self._undo.close()
            self._holders.discard(holder)


def changing_first(change: Callable[[Any], Any]) -> Wrap:
    """Return a wrapper that applies ``change`` to the first argument of a function."""
    return lambda own: functools.wraps(own)(lambda first, *args, **kwargs: own(change(first), *args, **kwargs))


class ThreadSnapshot(NamedTuple):
    """The state of a thread before a scope, or before the thread joined its first session.

    Attributes:
        config: see ``CastMode``.
        plan: see ``CastMode``.
        cache: see ``CastMode``.
        session: see ``CastMode``.
        key: see ``ThreadState``.
        explicit: see ``ThreadState``.
        native: for each device type on which the scope changes native autocast: the type, True if native autocast was
            on, and its dtype.
        native_cache: True if native autocast cached its casts.
        modes: torch's stack of function modes.
    """

    config: CastingConfig
    plan: Plan
    cache: WeightCache | None
    session: SessionEnd | None
    key: str
    explicit: bool
    native: list[tuple[str, bool, torch.dtype]]
    native_cache: bool
    modes: list[TorchFunctionMode]


@dataclasses.dataclass(eq=False)
class OpScope:
    """An open scope of a thread.

    Attributes:
        owner: the object that opened the scope and will close it.
        frame: the frame of the call that opened the scope; None for a ``with`` block.
        saved: the state that ``close`` restores; None if the scope changed nothing.
        patches: the torch names that the scope replaced, or None.
        watched: for a watched first pass, its kind and the count of changed ops before it; see ``first_passes``.
        casts: the arguments that the model may write to, and their casts; see ``inputs``.
    """

    owner: object
    frame: FrameType | None
    saved: ThreadSnapshot | None = None
    patches: Patches | None = None
    watched: tuple[Any, int] | None = None
    casts: Made = dataclasses.field(default_factory=list)


class ThreadState(threading.local):
    """The state of one thread.

    Attributes:
        key: the key of the current casting, also in compiled code; empty for a casting that does nothing.
        explicit: True if user code opened the innermost scope.
        open: the open scopes, the innermost last.
        traced: the states that compiled code will restore.
        session: the O1 session that the thread has joined, or None. It may be over already: ``join_session`` replaces
            it.
        outer: the state before the thread joined its first session; None if it has joined no session.
        mode: the function mode of the thread.
        cache: the cached casts of weights.
    """

    def __init__(self) -> None:
        self.key = ""
        self.explicit = False
        self.open: list[OpScope] = []
        self.traced: list[Any] = []
        self.session: SessionEnd | None = None
        self.outer: ThreadSnapshot | None = None
        self.cache = WeightCache(self.open)
        self.mode = CastMode(lambda: close_interrupted(in_op=True))


thread = ThreadState()


def is_current(casting: CastingConfig) -> bool:
    """True if the state of this thread already equals ``casting``. Dynamo traces this function."""
    if thread.key != casting.key and (thread.key or not casting.is_noop):
        return False
    native = [d for d in casting.devices if d in NATIVE and torch.is_autocast_enabled(d)]
    same = native == list(casting.native) and all(torch.get_autocast_dtype(d) is casting.dtype for d in native)
    return casting.keeps_autocast or same


def is_recorded() -> bool:
    """True if ``torch.export`` or ``torch.jit.trace`` records ops, to run them later."""
    return torch.compiler.is_exporting() or jit_tracing_state() is not None


def set_current(
    casting: CastingConfig, devices: Iterable[str], session: SessionEnd | None = None, *, in_op: bool = False
) -> None:
    """Make a casting current in this thread.

    Args:
        casting: the casting.
        devices: the device types on which to set native autocast: on for devices in ``casting.native``, off otherwise.
        session: the session that the casting belongs to; the mode checks before every op if it is over.
        in_op: True if the mode is running an op. Torch has taken the mode off its stack for the op and puts it back
            afterwards, so this function must leave the stack as it is.
    """
    mode, thread.key = thread.mode, "" if casting.is_noop else casting.key
    mode.config, mode.session, mode.cache = casting, session, thread.cache if casting.cache else None
    # The graph of an export must contain every cast, and torch does not record the casts of native autocast.
    mode.plan = plan_of(casting, torch.compiler.is_exporting(), is_recorded())
    if not in_op:  # before native autocast changes, so that the mode runs the next op after an interrupt here
        place_mode(mode, mode.is_needed)
    for device in devices:
        torch.set_autocast_enabled(device, device in casting.native)
        if device in casting.native:
            torch.set_autocast_dtype(device, casting.dtype)
    if casting.enabled:
        all_native = casting.lists.level == "native" or not mode.plan.table
        # In a session no scope ends, so nothing would clear the cache of native autocast.
        torch.set_autocast_cache_enabled(casting.cache and all_native and session is None)


def plan_of(casting: CastingConfig, explicit: bool, recorded: bool) -> Plan:
    """Return the plan of a casting, which is built once; see ``build_table`` for ``explicit`` and ``recorded``."""
    plan = casting.plans.get((explicit, recorded))
    if plan is None:
        table, traced = (build_table(OpRules(*casting.rules, explicit, each)) for each in (recorded, True))
        plan = Plan(explicit, table, traced, call_again if casting.retries and not recorded else None)
        casting.plans[explicit, recorded] = plan
    return plan


def set_native(state: list[tuple[str, bool, torch.dtype]]) -> None:
    """Restore a state of native autocast."""
    for device, enabled, dtype in state:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


def in_autocast() -> bool:
    """True if this thread is in a ``torch.autocast`` block, such as a checkpoint's, which restores autocast itself."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting() > 0


def clear_cache() -> None:
    """Clear this thread's cache of 16-bit weights, and native autocast's."""
    thread.cache.clear()
    torch.clear_autocast_cache()


def save(devices: Iterable[str]) -> ThreadSnapshot:
    """Return the current state of this thread, with native autocast's on the given device types."""
    mode, native = thread.mode, [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices]
    now = mode.config, mode.plan, mode.cache, mode.session, thread.key, thread.explicit
    return ThreadSnapshot(*now, native, torch.is_autocast_cache_enabled(), function_modes())


def restore(saved: ThreadSnapshot, *, in_op: bool = False) -> None:
    """Restore a state of this thread; see ``set_current`` for ``in_op``."""
    set_native(saved.native)
    torch.set_autocast_cache_enabled(saved.native_cache)
    mode = thread.mode
    mode.config, mode.plan, mode.cache, mode.session, thread.key, thread.explicit = saved[:6]
    ours = [each for each in saved.modes if isinstance(each, CastMode)]
    if ours not in ([], [mode]):  # modes of compiled code
        set_function_modes(saved.modes)
    else:  # within an op the mode is off the stack, unless an interrupted op left it there
        place_mode(mode, not in_op and bool(ours) and mode.is_needed)


def close(owner: object, *, in_op: bool = False) -> bool:
    """Close the latest scope of an owner and the scopes opened within it; return False if the owner has none.

    A scope remains in ``thread.open``, with the frame ``ENDED``, until everything that it changed is restored. If an
    interrupt cuts this function short, ``close_interrupted`` therefore closes the scope again from the same record.
    """
    places, outer = [place for place, scope in enumerate(thread.open) if scope.owner is owner], thread.mode.frame
    if not places:
        return False
    for scope in thread.open[places[-1] :]:
        scope.frame = ENDED
    thread.mode.frame = sys._getframe()
    for scope in reversed(thread.open[places[-1] :]):
        if scope.patches is not None:
            scope.patches.release(scope)
        if scope.saved is not None:
            restore(scope.saved, in_op=in_op)
        if scope is thread.open[0]:
            clear_cache()
        thread.open.pop()
    frame = next((each.frame for each in reversed(thread.open) if each.frame is not None), None)
    thread.mode.frame = outer if frame is ENDED else frame  # a finalizer's scope, while another one changes
    return True


def close_interrupted(*, in_op: bool = False) -> None:
    """Close scopes whose calls ended without their second hook, because of a KeyboardInterrupt or a failed step."""
    # The scope of a `with` block has no frame, and counts as running.
    while thread.open and (frame := thread.open[-1].frame) is not None:
        # While `enter` or `close` changes a scope, the garbage collector may run a finalizer whose ops come here.
        if (thread.mode.frame if frame is ENDED else frame) in tuple(_frames()):
            break
        close(thread.open[-1].owner, in_op=in_op)
        if not thread.open and thread.mode.session is not None:
            # The interrupted call may have run within an op for which a rule had turned native autocast off.
            set_current(thread.mode.config, thread.mode.config.native, thread.mode.session, in_op=in_op)
    if thread.traced and not any(frame.f_code.co_filename.endswith(_EVAL_FRAME) for frame in _frames()):
        while thread.traced:
            leave_traced()


def _frames() -> Iterator[FrameType]:
    """Return the frames that are running in this thread, the innermost first."""
    return (frame for frame, _ in traceback.walk_stack(sys._getframe(1)))


# ---- scopes that compiled code enters


def push_traced(mode: CastMode, key: str, explicit: bool, native: list[Any]) -> None:
    """Push a mode while Dynamo traces; ``native`` lists the native autocast blocks that ``leave_traced`` exits."""
    outer = function_modes()
    thread.traced.append((outer, thread.key, thread.explicit, native))
    set_function_modes([*(each for each in outer if not isinstance(each, CastMode)), mode])
    thread.key, thread.explicit = key, explicit


def leave_traced() -> None:
    """Restore the state before the latest scope that compiled code entered."""
    record = thread.traced.pop()
    if record is not None:
        outer, thread.key, thread.explicit, native = record
        set_function_modes(outer)
        for entered in native:
            exit_autocast(entered)
