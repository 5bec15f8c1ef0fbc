"""``apex.pyprof.nvtx``, a stub. In Apex it wrapped every torch function in a profiler range."""

from __future__ import annotations

import functools
import logging
from typing import Any

__all__ = ["init", "wrap"]


@functools.cache
def init(*args: Any, **kwargs: Any) -> None:
    """Log once that this function does nothing."""
    logging.getLogger("halfstep").warning(
        "apex.pyprof marks nothing here. Run the steps within torch.autograd.profiler.emit_nvtx(), or use "
        "torch.profiler."
    )


def wrap(fun: Any, name: str) -> None:
    """Log once that this function does nothing; see ``init``.

    Args:
        fun: an object or module.
        name: the name of the function to profile.
    """
    init()
