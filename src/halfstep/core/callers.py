"""Who called: the line of a script that a warning is about."""

from __future__ import annotations

import os
import sys

import torch

__all__ = ["callers_level"]

_INSIDE = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)
"""Where torch and halfstep lie."""


def callers_level() -> int:
    """The ``stacklevel`` with which ``warnings.warn`` blames the nearest caller outside of torch and halfstep."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        level, frame = level + 1, frame.f_back
    return level
