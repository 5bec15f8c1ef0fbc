"""``apex.pyprof``: marks nothing, and says so. torch has its own marks now."""

from ...missing import refusing
from . import nvtx
from .nvtx import init, wrap

__all__ = ["init", "nvtx", "wrap"]

__getattr__ = refusing(__name__)
