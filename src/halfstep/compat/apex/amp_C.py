"""``amp_C``, the extension of Apex."""

from ..multi_tensor import *  # noqa: F403
from ..multi_tensor import __all__ as __all__
