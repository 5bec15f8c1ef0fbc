"""``apex.parallel.LARC``, a module."""

from ....optimizers import LARC

__all__ = ["LARC"]
