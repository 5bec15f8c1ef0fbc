"""Why a step is not faster: time by kind, what 16 bits can still give, and findings with their milliseconds.

It is a room of its own because it reads no numbers of a training, only when its ops begin and end.
"""

from .answer import Profile
from .run import of_run, profile

__all__ = ["Profile", "of_run", "profile"]
