"""``apex.fp16_utils``."""

from ..fp16_utils import *  # noqa: F403
from ..fp16_utils import __all__ as __all__
