"""The command line. Each subcommand is a module of its own, imported when it is asked for."""

__all__ = ["main"]


def main() -> None:
    """Run the command ``halfstep``."""
    from .app import app  # here, so that `halfstep.cli.machine` can be read where click is not installed

    app(prog_name="halfstep")
