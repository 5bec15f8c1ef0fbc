"""The casting that is current in each thread, and how torch is told: native autocast, the mode on its stack, and names
of torch that have wrappers meanwhile.

``scope`` decides which casting that is.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import threading
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
from .dispatch import CastMode, Plan, SessionEnd, function_modes, place, set_function_modes
from .meeting import call_again
from .rule_table import build_table
from .weight_cache import WeightCache

__all__ = [
    "ENDED",
    "Patches",
    "Saved",
    "Scope",
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
"""The frame of a call that has ended. A scope has it while it is opened or closed, which an interrupt may cut short."""

Wrap = Callable[[Any], Any]


class Patches:
    """Replacements of names of torch. The first holder has them put on, the last has torch's own put back.

    Args:
        wraps: for the name of a module, or of a class (``module:Class``), and of something in it, what makes the
            replacement from what is there. Names that this torch does not have are left out.
        hooks: for a function of torch that registers a hook and returns its handle, the hook.
    """

    def __init__(
        self, wraps: Mapping[tuple[str, str], Wrap], hooks: Mapping[Wrap, Any] = types.MappingProxyType({})
    ) -> None:
        # A name gets the same replacement each time, because Dynamo guards functions by identity.
        self._wraps = {name: functools.cache(wrap) for name, wrap in wraps.items()}
        self._hooks = hooks
        self._holders: set[object] = set()
        self._undo = ExitStack()
        # Each thread may be the first to hold them, or the last. A finalizer that releases them may run inside of both.
        self._lock = threading.RLock()

    def hold(self, holder: object) -> None:
        """Have the replacements in place until this holder, and all others, release them."""
        with self._lock:
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

    def hold_while(self, owner: object) -> None:
        """Hold the replacements until an owner is gone; a second call does nothing."""
        if id(owner) not in self._holders:
            self.hold(id(owner))
            weakref.finalize(owner, self.release, id(owner)).atexit = False

    def release(self, holder: object) -> None:
        """Hold them no more; a second call does nothing."""
        with self._lock:
            if self._holders == {holder}:
                self._undo.close()
            self._holders.discard(holder)


def changing_first(change: Callable[[Any], Any]) -> Wrap:
    """A wrapper of functions that changes their first argument."""
    return lambda own: functools.wraps(own)(lambda first, *args, **kwargs: own(change(first), *args, **kwargs))


class Saved(NamedTuple):
    """The state of a thread before a scope, or before its first session.

    Attributes:
        config: the config of the mode, as are the next three.
        plan: see ``CastMode``.
        cache: see ``CastMode``.
        session: see ``CastMode``.
        key: see ``ThreadState``.
        explicit: see ``ThreadState``.
        native: types of the devices on which native autocast changes, and whether and in which dtype it was on there.
        native_cache: True if native autocast kept its casts.
        modes: torch's stack.
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
class Scope:
    """An open scope of a thread.

    Attributes:
        owner: the object that opened it and will close it.
        frame: the frame of the call that opened it; None for a ``with`` block.
        saved: the state that its end puts back; None if it changed nothing.
        patches: names of torch that it has replaced, or None.
        watched: the kind of a first pass that is watched, and how many ops had met before it; see ``first_passes``.
        casts: the arguments of the model that may be written to, and their casts; see ``inputs``.
    """

    owner: object
    frame: FrameType | None
    saved: Saved | None = None
    patches: Patches | None = None
    watched: tuple[Any, int] | None = None
    casts: Made = dataclasses.field(default_factory=list)


class ThreadState(threading.local):
    """The state of one thread.

    Attributes:
        key: the key of the current casting, also in compiled code; empty for a casting that does nothing.
        explicit: True if the innermost scope is the user's.
        open: the open scopes, the innermost last.
        traced: the states that compiled code will put back.
        session: the O1 session that the thread has joined, or None. One that is over stays here until it is left.
        before: the state before the thread joined its first session.
        mode: the function mode.
        cache: the casts of weights.
    """

    def __init__(self) -> None:
        self.key = ""
        self.explicit = False
        self.open: list[Scope] = []
        self.traced: list[Any] = []
        self.session: SessionEnd | None = None
        self.before: Saved | None = None
        self.cache = WeightCache(self.open)
        self.mode = CastMode(self.cache, lambda: close_interrupted(in_op=True))


thread = ThreadState()


def is_current(casting: CastingConfig) -> bool:
    """True if the thread does already what a casting says. Dynamo traces this too."""
    if thread.key != casting.key and (thread.key or not casting.is_noop):
        return False
    native = [d for d in casting.devices if d in NATIVE and torch.is_autocast_enabled(d)]
    same = native == list(casting.native) and all(torch.get_autocast_dtype(d) is casting.dtype for d in native)
    return casting.keeps_autocast or same


def is_recorded() -> bool:
    """True if ops are recorded, to run later: by ``torch.export`` or ``torch.jit.trace``."""
    return torch.compiler.is_exporting() or jit_tracing_state() is not None


def set_current(
    casting: CastingConfig, devices: Iterable[str], session: SessionEnd | None = None, *, in_op: bool = False
) -> None:
    """Make a casting current: of these devices, native autocast is on for the casting's own and off for the rest.

    Args:
        casting: the casting.
        devices: types of devices.
        session: the session whose casting it is; every op asks if it is over.
        in_op: True if the mode runs an op, after which it is on torch's stack again.
    """
    mode, thread.key = thread.mode, "" if casting.is_noop else casting.key
    mode.config, mode.session, mode.cache = casting, session, mode.weights if casting.cache else None
    # The graph of an export must hold every cast, and native autocast leaves no trace in it.
    mode.plan = plan_of(casting, torch.compiler.is_exporting(), is_recorded())
    if not in_op:  # before native autocast changes, so that the mode runs the next op after an interrupt in here
        place(mode, mode.is_needed)
    for device in devices:
        torch.set_autocast_enabled(device, device in casting.native)
        if device in casting.native:
            torch.set_autocast_dtype(device, casting.dtype)
    if casting.enabled:
        all_native = casting.lists.level == "native" or not mode.plan.table
        # Outside of scopes nothing would end the casts that native autocast keeps.
        torch.set_autocast_cache_enabled(casting.cache and all_native and session is None)


def plan_of(casting: CastingConfig, explicit: bool, recorded: bool) -> Plan:
    """Return the plan of a casting, made once: ``explicit`` and ``recorded`` as of ``build_table``."""
    plan = casting.plans.get((explicit, recorded))
    if plan is None:
        table, traced = (build_table(*casting.rules, explicit, each) for each in (recorded, True))
        plan = Plan(explicit, table, traced, call_again if casting.meets and not recorded else None)
        casting.plans[explicit, recorded] = plan
    return plan


def set_native(state: list[tuple[str, bool, torch.dtype]]) -> None:
    """Put back a state of native autocast."""
    for device, enabled, dtype in state:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


def in_autocast() -> bool:
    """True if this thread is in a ``torch.autocast`` block (a checkpoint has one), which restores what it found."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting() > 0


def clear_cache() -> None:
    """Forget this thread's 16-bit casts of weights."""
    thread.cache.clear()
    torch.clear_autocast_cache()


def save(devices: Iterable[str]) -> Saved:
    """Return what is current, with the state of native autocast on these types of devices."""
    mode, native = thread.mode, [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices]
    now = mode.config, mode.plan, mode.cache, mode.session, thread.key, thread.explicit
    return Saved(*now, native, torch.is_autocast_cache_enabled(), function_modes())


def restore(saved: Saved, *, in_op: bool = False) -> None:
    """Put back what was current; ``in_op`` as of ``set_current``."""
    set_native(saved.native)
    torch.set_autocast_cache_enabled(saved.native_cache)
    mode = thread.mode
    mode.config, mode.plan, mode.cache, mode.session, thread.key, thread.explicit = saved[:6]
    ours = [each for each in saved.modes if isinstance(each, CastMode)]
    if ours not in ([], [mode]):  # those of compiled code
        set_function_modes(saved.modes)
    else:  # inside of an op the mode is not on the stack, unless an interrupted op has left it there
        place(mode, not in_op and bool(ours) and mode.is_needed)


def close(owner: object, *, in_op: bool = False) -> bool:
    """Close the latest scope of an owner, if there is one, and the scopes opened inside of it that are still open.

    Each scope stays in the list until all that it changed is as before, and no longer belongs to a running call. So
    ``close_interrupted`` closes it again, from the same record, after an interrupt in here.
    """
    places = [place for place, scope in enumerate(thread.open) if scope.owner is owner]
    if not places:
        return False
    for scope in thread.open[places[-1] :]:
        scope.frame = thread.mode.frame = ENDED
    for scope in reversed(thread.open[places[-1] :]):
        if scope.patches is not None:
            scope.patches.release(scope)
        if scope.saved is not None:
            restore(scope.saved, in_op=in_op)
        if scope is thread.open[0]:
            clear_cache()
        thread.open.pop()
    thread.mode.frame = next((each.frame for each in reversed(thread.open) if each.frame is not None), None)
    return True


def close_interrupted(*, in_op: bool = False) -> None:
    """Close the scopes of calls whose second hooks did not run: of a KeyboardInterrupt, or a step that failed."""
    # A ``with`` block has no frame, and always is running.
    while thread.open and thread.open[-1].frame not in (None, *_frames()):
        close(thread.open[-1].owner, in_op=in_op)
        if not thread.open and thread.mode.session is not None:
            # The call was perhaps inside of an op in which native autocast was off, and has ended with that op.
            set_current(thread.mode.config, thread.mode.config.native, thread.mode.session, in_op=in_op)
    if thread.traced and not any(frame.f_code.co_filename.endswith(_EVAL_FRAME) for frame in _frames()):
        while thread.traced:
            leave_traced()


def _frames() -> Iterator[FrameType]:
    """The calls that are running in this thread, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


# ---- scopes that compiled code has entered


def push_traced(mode: CastMode, key: str, explicit: bool, native: list[Any]) -> None:
    """Put a mode in force while Dynamo traces; what it has entered of native autocast ends with it."""
    before = function_modes()
    thread.traced.append((before, thread.key, thread.explicit, native))
    set_function_modes([*(each for each in before if not isinstance(each, CastMode)), mode])
    thread.key, thread.explicit = key, explicit


def leave_traced() -> None:
    """Put back what was before the latest scope that compiled code has entered."""
    record = thread.traced.pop()
    if record is not None:
        before, thread.key, thread.explicit, native = record
        set_function_modes(before)
        for entered in native:
            exit_autocast(entered)
