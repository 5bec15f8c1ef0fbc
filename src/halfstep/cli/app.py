"""The command ``halfstep`` and the list of its subcommands."""

from __future__ import annotations

import difflib
from importlib import import_module

import click

from .._version import __version__

__all__ = ["SUBCOMMANDS", "app"]

SUBCOMMANDS = {
    "demo": "Train a small model on real data at every opt level, side by side.",
    "run": "Run a script written for Apex, unedited.",
    "compare": "Where two saved runs part.",
    "parity": "The first op at which two callables round differently.",
    "migrate": "Rewrite code that calls Apex.",
    "oplists": "Which op runs in which precision.",
    "memory": "Bytes a parameter for every level and optimizer.",
    "doctor": "What this machine can do, or what loses precision in a script.",
    "profile": "Why a script is not faster.",
    "search": "Which modules must stay in fp32.",
}
"""The names and one-line help texts of subcommands. Each name is also the name of a module with a ``command``."""


class LazyGroup(click.Group):
    """A group whose subcommands are imported when they run, so that ``--help`` stays quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List the names in the order of ``SUBCOMMANDS``."""
        return list(SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the subcommand with a name; None for an unknown name."""
        if cmd_name not in SUBCOMMANDS:
            return None
        command = import_module(f".{cmd_name}", __package__).command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve an argument to its subcommand; refuse any other word with a suggestion."""
        word = args[0]
        if word not in SUBCOMMANDS and not word.startswith("-"):
            near = difflib.get_close_matches(word, SUBCOMMANDS, n=1)
            meant = near[0] if near else f"run {word}" if word.endswith(".py") else ""
            hint = f" Did you mean `halfstep {meant}`?" if meant else f" There are {', '.join(SUBCOMMANDS)}."
            ctx.fail(f"No such command {word!r}.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of subcommands without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl(list(SUBCOMMANDS.items()))


@click.command(
    cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]}, epilog="Example: halfstep doctor train.py"
)
@click.version_option(__version__, prog_name="halfstep")
def app() -> None:
    """Mixed-precision training for PyTorch."""
