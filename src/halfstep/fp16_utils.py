"""``apex.fp16_utils``, the explicit way of 2017: ``FP16_Optimizer``, master parameters and loss scalers by hand."""

from .compat import fp16_utils
from .compat.fp16_utils import *  # noqa: F403
from .compat.fp16_utils import __all__ as __all__
from .compat.install import second_name

second_name(__name__, fp16_utils)
