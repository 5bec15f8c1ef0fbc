"""``apex.contrib``."""

from ...missing import refusing

__getattr__ = refusing(__name__)
