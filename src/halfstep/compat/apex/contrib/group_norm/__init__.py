"""``apex.contrib.group_norm``."""

from .group_norm import GroupNorm

__all__ = ["GroupNorm"]
