"""``amp.debugging``, as Paddle calls it: the names of ``halfstep.diagnostics.debugging``."""

from ..diagnostics.debugging import *  # noqa: F403
from ..diagnostics.debugging import __all__ as __all__
