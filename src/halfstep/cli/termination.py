"""A handler that makes SIGTERM end a script as ``sys.exit`` does, so that its files are written at the end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

__all__ = ["exiting_on_sigterm"]


@contextmanager
def exiting_on_sigterm() -> Iterator[None]:
    """Make SIGTERM raise ``SystemExit`` within the block. A handler that the script sets has precedence.

    torchrun sends SIGTERM to the remaining ranks when one fails, and batch systems send it before a job's time is over.
    """

    def leave(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.getsignal(signal.SIGTERM)
    if before is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is leave:
            signal.signal(signal.SIGTERM, before)
