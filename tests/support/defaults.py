"""Other defaults of torch for what halfstep calls, and none for tests: ``pytest --defaults meta``, or a dtype.

A test makes its tensors as ever. A function of torch that a file of halfstep calls runs under another default device or
default dtype: what halfstep makes without naming them is somewhere else, or has another dtype, and the test fails.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

import halfstep

__all__ = ["DEFAULTS", "OtherDefaults"]

DEFAULTS = ("meta", "float64", "bfloat16", "float16")
SOURCES = str(Path(halfstep.__file__).parent)
OF_USERS = ("/casting/", "/apex/", "/paddle/tape.py", "/graph/")
"""Files that pass on a user's own calls, and modules whose parameters take the defaults as those of torch do."""


class OtherDefaults(TorchFunctionMode):
    """A block in which halfstep's own calls meet another default.

    Args:
        default: one of ``DEFAULTS``.
    """

    def __init__(self, default: str) -> None:
        super().__init__()
        self.dtype = None if default == "meta" else getattr(torch, default)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        file = sys._getframe(1).f_code.co_filename
        if not file.startswith(SOURCES) or any(part in file for part in OF_USERS):
            return func(*args, **kwargs)
        if self.dtype is None:
            made = func in _device_constructors() and kwargs.get("device") is None
            return func(*args, **kwargs, device="meta") if made else func(*args, **kwargs)
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            return func(*args, **kwargs)
        finally:
            torch.set_default_dtype(before)
