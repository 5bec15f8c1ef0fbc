"""Queries of the call stack: the line of user code that a warning blames, and running calls of torch."""

from __future__ import annotations

import os
import sys
from types import FrameType

import torch

__all__ = ["caller_in", "callers_level"]

_INSIDE = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)
"""The folders of torch and halfstep."""


def callers_level() -> int:
    """Compute the ``stacklevel`` with which ``warnings.warn`` blames the nearest caller outside torch and halfstep."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        level, frame = level + 1, frame.f_back
    return level


def caller_in(module: str) -> FrameType | None:
    """Find the nearest call of a function in a module, such as "torch.nn.utils.stateless"; None without one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != module:
        frame = frame.f_back
    return frame
