"""Which dtype each op computes in, scoped or for the whole process: native ``torch.autocast`` on every device type, and
on top of it a function mode where the op lists say otherwise than torch does.

A thread has one mode; entering a scope changes what it does, leaving it restores what was before, wherever the mode
stands on torch's stack. The tables are in ``mode``, what is done to a call in ``rules``.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

from ...core.oplists import OpLists
from . import guards
from .cache import WeightCache
from .mode import CastMode, build_table, install, uninstall
from .rules import Rule

__all__ = [
    "OpCasting",
    "activate",
    "active",
    "clear_cache",
    "deactivate",
    "disable_casts",
    "ensure_thread",
    "mode_of_thread",
    "process_casting",
]


@dataclass
class _State:
    """What was in force in a thread, to be put back."""

    active: OpCasting | None
    native: list[tuple[str, bool, torch.dtype]]
    native_cache: bool
    installed: bool


class _Thread(threading.local):
    """What is in force in one thread."""

    def __init__(self) -> None:
        self.active: OpCasting | None = None
        self.process: OpCasting | None = None
        self.before: _State | None = None
        self.open: list[_State] = []
        self.mode = CastMode()
        self.cache = WeightCache()


_thread = _Thread()
_process: OpCasting | None = None


@functools.cache
def _device_types() -> tuple[str, ...]:
    return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


_tables: dict[str, dict[Callable[..., Any], Rule]] = {}


def _prepare(lists: str) -> int:
    """Have ``_tables`` ready for some lists, and say how many device types there are.

    Dynamo calls this while it traces and takes what it returns for a constant.
    """
    _tables[lists] = build_table(OpLists.parse(lists), _device_types(), False)
    return len(_device_types())


_prepare._dynamo_marked_constant = True  # type: ignore[attr-defined]


class OpCasting:
    """A scope in which ops are cast, on the CPU and on CUDA alike; thread-local, re-entrant.

    An inner scope replaces the outer one. Backward passes inside are not cast, and activation checkpoints made inside
    recompute under the same lists.

    Args:
        dtype: the 16-bit dtype of the ops on the half list.
        lists: which ops run in which precision.
        enabled: False makes a scope in which nothing is cast.
        cache: cast each fp32 parameter at most once between two backward passes or calls of ``clear_cache``.
        verbose: log each cast at level INFO of the logger "halfstep".
        allow_banned: run banned ops in fp32 instead of refusing 16-bit inputs.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        lists: OpLists | None = None,
        *,
        enabled: bool = True,
        cache: bool = True,
        verbose: bool = False,
        allow_banned: bool = False,
    ) -> None:
        self.dtype = dtype
        self.lists = lists or OpLists.default()
        self.enabled = enabled
        self.cache = cache
        self.verbose = verbose
        self.allow_banned = allow_banned

    def __enter__(self) -> OpCasting:
        if torch.compiler.is_compiling():
            return self._enter_compiled()
        state = _capture()
        if self.enabled:
            guards.hold(_uncast, _remember, clear_cache)
        _put(self if self.enabled else None, self.dtype)
        _thread.open.append(state)
        return self

    def __exit__(self, *exc: object) -> None:
        if torch.compiler.is_compiling():
            self._exit_compiled()
            return
        if self.enabled:
            guards.release()
        _restore(_thread.open.pop())
        if not _thread.open:
            if _thread.process is None:
                clear_cache()
            ensure_thread()

    def _enter_compiled(self) -> OpCasting:
        """Dynamo traces native autocast and function modes, and none of our bookkeeping."""
        name = str(self.lists)
        devices = ("cpu", "cuda")[: _prepare(name)]
        self._native = [_enter_autocast(device, self.dtype, self.enabled, False) for device in devices]
        if self.enabled:
            mode = CastMode()
            mode.table = _tables[name]
            mode.dtype = self.dtype
            mode.devices = devices
            mode.allow_banned = self.allow_banned
            mode.__enter__()  # type: ignore[no-untyped-call]
            self._mode = mode
        return self

    def _exit_compiled(self) -> None:
        if self.enabled:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        for entered in self._native:
            _exit_autocast(entered)


def active() -> OpCasting | None:
    """The casting in force in this thread, or None."""
    return _thread.active


def mode_of_thread() -> CastMode:
    """The mode that casts in this thread, whether or not it is on the stack."""
    return _thread.mode


def process_casting() -> OpCasting | None:
    """The casting of the whole process, which ``activate`` sets, or None."""
    return _process


def activate(casting: OpCasting) -> None:
    """Cast ops in the whole process from now on: in this thread at once, in others when they run an O1 model."""
    global _process
    if _process is None:
        guards.hold(_uncast, _remember, clear_cache)
    _process = casting
    ensure_thread()


def deactivate() -> None:
    """Take the process-wide casting down; this thread gets back what it had before."""
    global _process
    if _process is None:
        return
    _process = None
    guards.release()
    ensure_thread()


def ensure_thread() -> None:
    """Bring this thread in line with the process: every O1 model calls it before its forward.

    Inside a scope the scope has its way, and the thread joins when it is left.
    """
    if torch.compiler.is_compiling():
        return
    if not torch.is_grad_enabled():
        _thread.cache.clear()
    if _thread.process is _process or _thread.open:
        return
    clear_cache()
    if _thread.before is not None:
        _restore(_thread.before)
        _thread.before = None
    _thread.process = _process
    if _process is not None:
        _thread.before = _capture()
        _put(_process, _process.dtype)


@contextmanager
def disable_casts() -> Iterator[None]:
    """A scope without op casting, in this thread; exceptions and nesting leave it as they found it."""
    with OpCasting(torch.bfloat16, enabled=False):
        yield


def clear_cache() -> None:
    """Forget the 16-bit copies of fp32 parameters."""
    _thread.cache.clear()
    torch.clear_autocast_cache()


def _capture() -> _State:
    native = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _device_types()]
    return _State(_thread.active, native, torch.is_autocast_cache_enabled(), _installed())


def _installed() -> bool:
    """Whether the thread's mode is on the stack; inside its own ``__torch_function__`` it is not."""
    size = torch._C._len_torch_function_stack()
    return any(torch._C._get_function_stack_at(i) is _thread.mode for i in range(size))


def _put(casting: OpCasting | None, dtype: torch.dtype) -> None:
    for device in _device_types():
        torch.set_autocast_enabled(device, casting is not None)
        torch.set_autocast_dtype(device, dtype)
    wanted = _set_mode(casting)
    torch.set_autocast_cache_enabled(casting is not None and casting.cache and not wanted)
    _place(wanted)


def _set_mode(casting: OpCasting | None) -> bool:
    """Make the thread's mode do what a casting says; whether it is needed at all."""
    _thread.active = casting
    mode = _thread.mode
    if casting is None:
        return False
    mode.table = build_table(casting.lists, _device_types(), casting.verbose)
    mode.dtype = casting.dtype
    mode.devices = _device_types()
    mode.cache = _thread.cache if casting.cache else None
    mode.verbose = casting.verbose
    mode.allow_banned = casting.allow_banned
    return bool(mode.table)


def _restore(state: _State) -> None:
    for device, enabled, dtype in state.native:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_cache_enabled(state.native_cache)
    _set_mode(state.active)
    _place(state.installed)


def _place(wanted: bool) -> None:
    if wanted != _installed():
        (install if wanted else uninstall)(_thread.mode)


def _uncast(own: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass runs without casts: its ops have the dtypes that forward chose."""

    @functools.wraps(own)
    def uncast(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or active() is None:
            return own(*args, **kwargs)
        clear_cache()
        with OpCasting(torch.bfloat16, enabled=False):
            return own(*args, **kwargs)

    return uncast


def _remember(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs under the casting of now, for a checkpoint that recomputes it later."""
    casting = active()
    if casting is None:
        return function

    @functools.wraps(function, updated=())
    def remembering(*args: Any, **kwargs: Any) -> Any:
        if active() is casting:
            return function(*args, **kwargs)
        with casting:
            return function(*args, **kwargs)

    return remembering
