"""``halfstep profile``: why a script is not faster; the command itself is in ``profiling/command.py``."""

from ..profiling.command import make_command
from .script import SCRIPT_SETTINGS, takes_script

__all__ = ["command"]

command = make_command(takes_script(required=True), SCRIPT_SETTINGS)
