"""``halfstep.Model``: prepare, fit, evaluate and predict, after Paddle's high-level API."""

from .paddle.model import *  # noqa: F403
from .paddle.model import __all__ as __all__

__dir__ = __all__.copy
