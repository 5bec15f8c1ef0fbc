"""Names that torch has removed since Apex scripts were written, restored for ``halfstep run``."""

from __future__ import annotations

import collections.abc
import importlib.abc
import importlib.machinery
import logging
import math
import os
import sys
from collections.abc import Sequence
from types import ModuleType

__all__ = ["bring_back_six", "trust_checkpoints"]

logger = logging.getLogger("halfstep")

_SIX = {
    "container_abcs": collections.abc,
    "inf": math.inf,
    "int_classes": int,
    "nan": math.nan,
    "string_classes": (str, bytes),
    "PY3": True,
    "PY37": True,
    "FileNotFoundError": FileNotFoundError,
}


class _Six(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A finder for ``torch._six``, which torch 2.0 removed. The last finder: a real module has priority."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self) if fullname == "torch._six" else None

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(_SIX)
        logger.warning("torch has no torch._six since 2.0; halfstep run stands in for it.")


_finder = _Six()


def bring_back_six() -> None:
    """Make ``import torch._six`` work; the first import logs this."""
    if _finder not in sys.meta_path:
        sys.meta_path.append(_finder)


def trust_checkpoints() -> None:
    """Make ``weights_only=False`` the default of ``torch.load``, as before torch 2.6.

    It sets an environment variable, so that processes that a script starts have the same default.
    """
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    logger.warning("--trust-checkpoints: torch.load unpickles what it reads, and a file can run any code that way.")
