"""The call stack: the line of a script that a warning is about, and calls of torch that are running."""

from __future__ import annotations

import os
import sys
from types import FrameType

import torch

__all__ = ["caller_in", "callers_level"]

_INSIDE = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)
"""Where torch and halfstep lie."""


def callers_level() -> int:
    """The ``stacklevel`` with which ``warnings.warn`` blames the nearest caller outside of torch and halfstep."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        level, frame = level + 1, frame.f_back
    return level


def caller_in(module: str) -> FrameType | None:
    """The nearest call on the stack of a function in a module, such as "torch.nn.utils.stateless"; None without one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != module:
        frame = frame.f_back
    return frame
