"""``halfstep.Model``: prepare, fit, evaluate and predict, after Paddle's high-level API and on top of ``amp``."""

from .callbacks import Callback
from .check_precision import CheckPrecision
from .model import Model

__all__ = ["Callback", "CheckPrecision", "Model"]
