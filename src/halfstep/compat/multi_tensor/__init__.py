"""``apex.multi_tensor_apply`` and ``amp_C``: the multi-tensor operations under the names and arguments Apex gave them.

Each takes ``(chunk_size, noop_flag, tensor_lists, *args)``. ``chunk_size`` is accepted and not needed. ``noop_flag`` is
a tensor with one element: operations that check set it to 1 if they read inf or NaN, operations that obey change
nothing where it is not 0. Nothing is read back from the device. Lists may mix dtypes.
"""

from .basic import *  # noqa: F403
from .basic import __all__ as _basic
from .steps import *  # noqa: F403
from .steps import __all__ as _steps

__all__ = [*_basic, *_steps]
__dir__ = __all__.copy
