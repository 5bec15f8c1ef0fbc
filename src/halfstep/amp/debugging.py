"""``amp.debugging``, as Paddle calls it: the names of ``halfstep.debugging``."""

from ..debugging import *  # noqa: F403
from ..debugging import __all__ as __all__
