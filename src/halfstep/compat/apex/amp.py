"""``apex.amp``: ``halfstep.amp`` with float16 as default on every device.

``HALFSTEP_OPT_LEVEL`` and ``HALFSTEP_DTYPE`` in the environment override what a script asks for; ``halfstep run`` sets
them.
"""

from __future__ import annotations

import functools
import inspect
import os
from typing import Any

from ... import amp as _amp
from ...amp import *  # noqa: F403
from ...amp import __all__ as _names
from ...amp import _amp_state as _amp_state

__all__ = [*_names]

_IN_BFLOAT16 = ("O4", "O5")  # the ROCm fork's levels


def _dtype(given: Any) -> Any:
    return os.environ.get("HALFSTEP_DTYPE") or given or "float16"


@functools.wraps(_amp.initialize)  # type: ignore[no-redef]
def initialize(*args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(_amp.initialize).bind(*args, **kwargs).arguments
    if given.get("policy") is not None:
        return _amp.initialize(**given)
    level = os.environ.get("HALFSTEP_OPT_LEVEL")
    if level:
        given["opt_level"] = level
    if given.get("opt_level", "O1") not in _IN_BFLOAT16:
        given["dtype"] = _dtype(given.get("dtype"))
    return _amp.initialize(**given)


@functools.wraps(_amp.init)  # type: ignore[no-redef]
def init(*args: Any, **kwargs: Any) -> Any:
    kwargs["dtype"] = _dtype(kwargs.get("dtype"))
    return _amp.init(*args, **kwargs)
