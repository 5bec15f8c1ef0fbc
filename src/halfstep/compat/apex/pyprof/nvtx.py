"""``apex.pyprof.nvtx``, which wrapped every function of torch in a mark for a profiler."""

from __future__ import annotations

import functools
import logging
from typing import Any

__all__ = ["init", "wrap"]


@functools.cache
def init(*args: Any, **kwargs: Any) -> None:
    """Does nothing, and says so once."""
    logging.getLogger("halfstep").warning(
        "apex.pyprof marks nothing here. Run the steps within torch.autograd.profiler.emit_nvtx(), or use "
        "torch.profiler."
    )


def wrap(fun: Any, name: str) -> None:
    """Does nothing: see ``init``.

    Args:
        fun: an object or module.
        name: of its function that was to be marked.
    """
    init()
