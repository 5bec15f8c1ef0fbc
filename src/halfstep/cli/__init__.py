"""The command line. Each subcommand is a module of its own, imported when it is asked for."""

from collections.abc import Callable

__all__ = ["main"]


def main() -> None:
    """Run the command ``halfstep``."""
    from .app import app  # here, so that `halfstep.cli.machine` can be read where click is not installed

    later: list[Callable[[], None]] = []
    try:
        app(prog_name="halfstep", obj=later)
    except SystemExit as left:
        if left.code or not later:
            raise
    for script in later:
        script()
