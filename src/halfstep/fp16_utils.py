"""``apex.fp16_utils``, the explicit way of 2017: ``FP16_Optimizer``, master parameters and loss scalers by hand."""

from .compat.fp16_utils import *  # noqa: F403
from .compat.fp16_utils import __all__ as __all__
