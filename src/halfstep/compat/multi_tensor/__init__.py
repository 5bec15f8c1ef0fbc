"""The multi-tensor operations of ``amp_C``; ``halfstep.multi_tensor`` says what they take."""

from .basic import *  # noqa: F403
from .basic import __all__ as _basic
from .steps import *  # noqa: F403
from .steps import __all__ as _steps

__all__ = [*_basic, *_steps]
