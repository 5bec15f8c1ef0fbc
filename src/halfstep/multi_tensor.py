"""``amp_C`` and ``apex.multi_tensor_apply``: ``halfstep.compat.multi_tensor`` under its public name."""

from .compat import multi_tensor
from .compat.install import second_name
from .compat.multi_tensor import *  # noqa: F403
from .compat.multi_tensor import __all__ as __all__

second_name(__name__, multi_tensor)
