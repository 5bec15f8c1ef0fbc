"""Names that torch had when scripts for Apex were written, and has no more: for ``halfstep run``."""

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
    """Finds ``torch._six``, which torch 2.0 removed. Stands last: a torch that has it keeps it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self) if fullname == "torch._six" else None

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(_SIX)
        logger.warning("torch has no torch._six since 2.0; halfstep run stands in for it.")


_finder = _Six()


def bring_back_six() -> None:
    """Let ``import torch._six`` find what it had; the first import says so."""
    if _finder not in sys.meta_path:
        sys.meta_path.append(_finder)


def trust_checkpoints() -> None:
    """Have ``torch.load`` unpickle whatever it reads, as before torch 2.6, unless a call says otherwise.

    By the environment, so that the processes that a script starts do the same.
    """
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    logger.warning("--trust-checkpoints: torch.load unpickles what it reads, and a file can run any code that way.")
