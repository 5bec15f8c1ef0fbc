"""Apex's module tree by its own names: ``halfstep.apex.install()`` makes ``import apex`` find it.

This is ``halfstep.compat.apex`` under its public name, and so is every module below it.
"""

import sys

from .compat import apex
from .compat.apex import install, uninstall
from .compat.install import SecondNames

__all__ = ["install", "uninstall"]

sys.meta_path.insert(0, SecondNames({__name__: apex.__name__}))
sys.modules[__name__] = apex
