"""``apex.multi_tensor_apply`` and ``amp_C``: the multi-tensor operations with Apex's names and arguments.

Each operation takes ``(chunk_size, noop_flag, tensor_lists, *args)``. ``chunk_size`` has no effect. ``noop_flag`` is a
tensor with one element: operations documented as "Checks" set it to 1 if they read inf or NaN, operations documented as
"Obeys" change nothing if it is not 0. No operation reads the device. Lists may mix dtypes.
"""

from .basic import *  # noqa: F403
from .basic import __all__ as _basic
from .steps import *  # noqa: F403
from .steps import __all__ as _steps

__all__ = [*_basic, *_steps]
__dir__ = __all__.copy
