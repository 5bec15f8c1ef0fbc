"""The logger "halfstep", seen by those who ask for what it says at level INFO."""

import logging

__all__ = ["show_log"]


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
