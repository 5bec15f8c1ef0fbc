"""Formatting for messages and reports, and the output of the logger "halfstep"."""

import logging
import os
from collections.abc import Sequence

from .._version import __version__

__all__ = ["counted", "install_line", "listed", "numbered", "show_log"]

RELEASED = ".dev" not in __version__
"""True if this version is on the package index; otherwise only a clone of the repository can be installed."""


def counted(count: int, one: str, many: str | None = None) -> str:
    """Format a number with its noun: ``1 step``, ``1,437 images``, ``0 losses``.

    Args:
        count: the number.
        one: the singular noun.
        many: the plural noun; by default the singular with an s.
    """
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def listed(names: Sequence[str], most: int = 3) -> str:
    """Format the first names and the number of remaining ones: ``a, b, c and 2 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def numbered(names: Sequence[str], form: str = "{} {}") -> list[str]:
    """Tell equal names apart by a number: ``SGD 0, Adam, SGD 1``; a name that occurs once stays as it is.

    Args:
        names: the names.
        form: the format of a name and its number.
    """
    return [form.format(name, names[:i].count(name)) if names.count(name) > 1 else name for i, name in enumerate(names)]


def install_line(extra: str) -> str:
    """Return the command that installs an extra: ``pip install 'halfstep[demo]'``, before a release from a clone."""
    return f"pip install 'halfstep[{extra}]'" if RELEASED else f"pip install '.[{extra}]' in a clone of the repository"


def show_log(*, asked: bool = True) -> None:
    """Make messages of the logger "halfstep" at level INFO visible.

    A level and handlers that the program has set for this logger are kept. Without handlers the logger writes to stderr
    from now on, until the program gives the root logger a handler.

    Args:
        asked: False if the user did not ask for messages. A program that has set up logging, and ranks other than 0,
            are left alone then.
    """
    logger = logging.getLogger("halfstep")
    if not asked and (logger.hasHandlers() or os.environ.get("RANK", "0") != "0"):
        return
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        logger.addHandler(handler := logging.StreamHandler())
        handler.addFilter(lambda _: not logging.getLogger().handlers)
