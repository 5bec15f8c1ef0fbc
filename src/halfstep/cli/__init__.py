"""The command line. Each subcommand is a separate module that is imported when it runs."""

from collections.abc import Callable

__all__ = ["main"]


def main() -> None:
    """Run the command ``halfstep``."""
    from .app import app  # a lazy import, so that `halfstep.cli.machine` can be imported without click

    later: list[Callable[[], None]] = []
    try:
        app(prog_name="halfstep", obj=later)
    except SystemExit as left:
        if left.code or not later:
            raise
    for script in later:
        script()
