"""``halfstep parity``, whose command is in the room of the tool."""

from ..parity.command import command as command
