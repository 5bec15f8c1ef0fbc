"""``halfstep search``, whose command is in the room of the tool."""

from ..searching.command import command as command
