"""``apex.pyprof``: a stub that records nothing and logs this. Use torch's profiler."""

from ...missing import refusing
from . import nvtx
from .nvtx import init, wrap

__all__ = ["init", "nvtx", "wrap"]

__getattr__ = refusing(__name__)
