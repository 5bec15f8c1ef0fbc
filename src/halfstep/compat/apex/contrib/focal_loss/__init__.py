"""``apex.contrib.focal_loss``, whose ``focal_loss`` is a module."""

from . import focal_loss

__all__ = ["focal_loss"]
