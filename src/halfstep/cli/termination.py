"""SIGTERM ends a script as ``sys.exit`` does, so that what is written at its end is written."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

__all__ = ["exiting_on_sigterm"]


@contextmanager
def exiting_on_sigterm() -> Iterator[None]:
    """Within the block SIGTERM raises ``SystemExit``. A handler that the script sets itself has precedence.

    torchrun sends it to the other ranks when one has failed, and batch systems before a job's time is over.
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
