"""Statistics of tensors over steps, and the place at which two runs diverge."""

from .diagnostics.numerics import *  # noqa: F403
from .diagnostics.numerics import __all__ as __all__

__dir__ = __all__.copy
