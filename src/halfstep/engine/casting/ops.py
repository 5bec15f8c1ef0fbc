"""Which dtype each op computes in: ``torch.autocast`` on every device type at once, scoped or for the whole process."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ...core.oplists import OpLists

__all__ = [
    "OpCasting",
    "activate",
    "active",
    "clear_cache",
    "deactivate",
    "disable_casts",
    "ensure_thread",
    "process_casting",
]


class _Thread(threading.local):
    """What is in force in one thread."""

    def __init__(self) -> None:
        self.active: OpCasting | None = None
        self.process: OpCasting | None = None
        self.before: list[tuple[str, bool, torch.dtype]] = []
        self.open: list[tuple[OpCasting | None, ExitStack]] = []


_thread = _Thread()
_process: OpCasting | None = None


def _device_types() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


class OpCasting:
    """A scope in which ops are cast, on the CPU and on CUDA alike; thread-local, re-entrant.

    Args:
        dtype: the 16-bit dtype of the ops on the half list.
        lists: which ops run in which precision.
        enabled: False makes a scope in which nothing is cast.
        cache: cast each fp32 parameter at most once between two calls of ``clear_cache``.
        verbose: log each cast.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        lists: OpLists | None = None,
        *,
        enabled: bool = True,
        cache: bool = True,
        verbose: bool = False,
    ) -> None:
        self.dtype = dtype
        self.lists = lists or OpLists.default()
        self.enabled = enabled
        self.cache = cache
        self.verbose = verbose

    def __enter__(self) -> OpCasting:
        stack = ExitStack()
        for device in _device_types():
            stack.enter_context(torch.autocast(device, self.dtype, enabled=self.enabled, cache_enabled=self.cache))
        _thread.open.append((_thread.active, stack))
        _thread.active = self if self.enabled else None
        return self

    def __exit__(self, *exc: object) -> None:
        _thread.active, stack = _thread.open.pop()
        stack.close()


def active() -> OpCasting | None:
    """The casting in force in this thread, or None."""
    return _thread.active


def process_casting() -> OpCasting | None:
    """The casting of the whole process, which ``activate`` sets, or None."""
    return _process


def activate(casting: OpCasting) -> None:
    """Cast ops in the whole process from now on: in this thread at once, in others when they run an O1 model."""
    global _process
    if _process is None:
        _guard_autograd()
    _process = casting
    ensure_thread()


def deactivate() -> None:
    """Take the process-wide casting down; this thread gets back what it had before."""
    global _process
    if _process is None:
        return
    _process = None
    _release_autograd()
    ensure_thread()


def ensure_thread() -> None:
    """Bring this thread in line with the process: every O1 model calls it before its forward."""
    if torch.compiler.is_compiling() or _thread.process is _process:
        return
    for device, enabled, dtype in _thread.before:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)
    _thread.before.clear()
    _thread.process = _thread.active = _process
    torch.clear_autocast_cache()
    if _process is None:
        return
    for device in _device_types():
        _thread.before.append((device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)))
        torch.set_autocast_enabled(device, True)
        torch.set_autocast_dtype(device, _process.dtype)


@contextmanager
def disable_casts() -> Iterator[None]:
    """A scope without op casting, in this thread; exceptions and nesting leave it as they found it."""
    with OpCasting(torch.bfloat16, enabled=False):
        yield


def clear_cache() -> None:
    """Forget the 16-bit copies of fp32 parameters."""
    torch.clear_autocast_cache()


_own_autograd: dict[str, Callable[..., Any]] = {}


def _guard_autograd() -> None:
    """While O1 is on, run the backward pass itself without casts: its ops have the dtypes that forward chose."""
    for name in ("backward", "grad"):
        own = _own_autograd[name] = getattr(torch.autograd, name)

        @functools.wraps(own)
        def uncast(*args: Any, _own: Callable[..., Any] = own, **kwargs: Any) -> Any:
            if active() is None:
                return _own(*args, **kwargs)
            with disable_casts():
                return _own(*args, **kwargs)

        setattr(torch.autograd, name, uncast)


def _release_autograd() -> None:
    for name, own in _own_autograd.items():
        setattr(torch.autograd, name, own)
    _own_autograd.clear()
