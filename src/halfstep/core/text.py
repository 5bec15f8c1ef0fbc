"""Words of messages and reports, and where messages of the logger "halfstep" go."""

import logging
from collections.abc import Sequence

from .._version import __version__

__all__ = ["counted", "install_line", "listed", "show_log"]

RELEASED = ".dev" not in __version__
"""True if this version is on the package index; otherwise there is only a clone of the repository."""


def counted(count: int, one: str, many: str | None = None) -> str:
    """A number and its noun: ``1 step``, ``1,437 images``, ``0 losses``.

    Args:
        count: how many there are.
        one: the noun for one of them.
        many: the noun for more than one; by default with an s.
    """
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def listed(names: Sequence[str], most: int = 3) -> str:
    """The first of some names, and the number of the others: ``a, b, c and 2 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def install_line(extra: str) -> str:
    """The command that installs an extra: ``pip install 'halfstep[demo]'``, before a release from a clone."""
    return f"pip install 'halfstep[{extra}]'" if RELEASED else f"pip install '.[{extra}]' in a clone of the repository"


def show_log() -> None:
    """Let what the logger "halfstep" says at level INFO be seen.

    A level that a program gave this logger stays, and so do the handlers that it has set up. Where there are none, the
    logger writes to stderr from now on.
    """
    logger = logging.getLogger("halfstep")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
