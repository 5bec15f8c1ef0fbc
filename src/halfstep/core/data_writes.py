"""Notice when ``param.data`` is used: what is written through it gives the parameter no new version.

16-bit copies and masters use versions to see whether a weight was written to, so they watch ``Parameter.data`` too.
That attribute of torch is replaced only while something watches.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch

__all__ = ["Watcher", "watch"]


class Watcher(Protocol):
    """Is told when ``param.data`` is used."""

    def touch(self, param: torch.Tensor) -> None:
        """``param.data`` was read or set, so it may be written to."""


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
