"""Apex's module tree by its own names: ``halfstep.apex.install()`` makes ``import apex`` find it.

This is ``halfstep.compat.apex`` under its public name, and so is every module below it.
"""

from .compat import apex
from .compat.apex import install, uninstall
from .compat.install import second_name

__all__ = ["install", "uninstall"]

second_name(__name__, apex)
