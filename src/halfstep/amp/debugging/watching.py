"""Look at each op that this thread runs, from one call to another and not only within a block."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ...numerics.compiled import compiled_code_eager
from ...numerics.ops import OpCall, OpWatch
from ...numerics.owners import Owners

__all__ = ["Watching"]


class Watching:
    """Calls a function after each op, from ``begin`` to ``end``. An error of the function ends it, too.

    Several may be on, and end in any order.

    Args:
        notice: gets each call.
    """

    def __init__(self, notice: Callable[[OpCall], object]) -> None:
        self._notice = notice
        self._open: list[AbstractContextManager[Any]] = []
        self._ended = False

    def begin(self) -> None:
        """From here on ops are looked at. Compiled code runs eagerly, so that its ops are seen."""
        self._open = [compiled_code_eager, OpWatch(self._look, Owners())]
        for each in self._open:
            each.__enter__()

    def end(self) -> None:
        """No longer."""
        self._ended = True
        while self._open:
            self._open.pop().__exit__(None, None, None)

    def _look(self, call: OpCall) -> None:
        if self._ended:
            return
        try:
            self._notice(call)
        except BaseException:
            self._ended = True  # the mode can only leave the stack where nothing runs
            raise
