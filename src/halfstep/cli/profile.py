"""``halfstep profile``: why a script is not faster; the command itself is in ``profiling/command.py``."""

from ..profiling.command import make_command
from .script import SCRIPT_SETTINGS, Script, script_options

__all__ = ["command"]

command = make_command(Script, script_options(required=True), SCRIPT_SETTINGS)
