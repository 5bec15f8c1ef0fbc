"""Writes that leave no trace: what is written to ``param.data`` gives the parameter no new version.

Who relies on versions to know that a weight is what it was (16-bit copies, masters) asks to be told.
``Parameter.data`` is ours only while somebody does.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch

__all__ = ["Watcher", "watch"]


class Watcher(Protocol):
    """Who is told."""

    def touch(self, param: torch.Tensor) -> None:
        """``param.data`` was read or set: whoever did may write to it."""


_data: Any = torch.Tensor.data
_watchers: weakref.WeakSet[Any] = weakref.WeakSet()


class _WatchedData:
    """``Parameter.data`` that tells the watchers."""

    def __get__(self, param: torch.Tensor | None, kind: type) -> Any:
        if param is None:
            return self
        for watcher in _watchers:
            watcher.touch(param)
        return _data.__get__(param)

    def __set__(self, param: torch.Tensor, value: torch.Tensor) -> None:
        for watcher in _watchers:
            watcher.touch(param)
        _data.__set__(param, value)

    def __delete__(self, param: torch.Tensor) -> None:
        _data.__delete__(param)


_count = 0


def watch(watcher: Watcher) -> None:
    """Tell a watcher of each parameter whose ``data`` is read or set, as long as the watcher lives."""
    global _count
    _count += 1
    if _count == 1:
        torch.nn.Parameter.data = _WatchedData()  # type: ignore[assignment]
    _watchers.add(watcher)
    weakref.finalize(watcher, _unwatch).atexit = False


def _unwatch() -> None:
    global _count
    _count -= 1
    if _count == 0:
        del torch.nn.Parameter.data
