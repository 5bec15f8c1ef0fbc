"""Lets timm be imported where torchvision is not installed: there is none for every torch, and timm uses little."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

__all__ = ["import_timm"]


class _Constants(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Stub(ModuleType):
    """A module in which every name is an empty class, whose every attribute is its name."""

    __path__: list[str] = []  # noqa: RUF012 - it makes the module a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Constants(name, (), {})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        mine = name.partition(".")[0] == "torchvision"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if mine else None

    def create_module(self, spec: Any) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def import_timm() -> None:
    """Import timm, with an empty torchvision that is gone afterwards where there is no other.

    Raises:
        ImportError: where there is no timm.
    """
    if importlib.util.find_spec("torchvision") is not None:
        importlib.import_module("timm.optim")
        return
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        for name in ("timm.optim", "timm.utils", "timm.models"):
            importlib.import_module(name)
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
