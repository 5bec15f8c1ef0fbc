"""Submodules that only name what another module has: ``apex.optimizers.fused_adam`` holds ``FusedAdam``.

Apex had a file for each. Here a module lists them in a table, and becomes a package by that.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType

from .missing import refusing

__all__ = ["add_submodules"]


def add_submodules(package: str, contents: Mapping[str, str], *, also: Mapping[str, object] | None = None) -> None:
    """Make submodules of a module that is being imported. An attribute that the module has already stays.

    Args:
        package: the ``__name__`` of the module.
        contents: for each submodule the names it has, with spaces between. They are taken from the module.
        also: names that the module itself does not have.
    """
    parent = sys.modules[package]
    vars(parent).setdefault("__path__", [])
    known = {**vars(parent), **(also or {})}
    for name, names in contents.items():
        values = {each: known[each] for each in names.split()}
        add_submodule(package, name, values)


def add_submodule(package: str, name: str, values: Mapping[str, object]) -> None:
    """Make one submodule of a package that is being imported.

    Args:
        package: the name of the package.
        name: of the submodule, in the package.
        values: its attributes.
    """
    own = f"{package}.{name}"
    module = ModuleType(own, f"``{own.removeprefix('halfstep.compat.')}``.")
    module.__spec__ = ModuleSpec(own, None)
    vars(module).update(values, __all__=[*values], __getattr__=refusing(own))
    sys.modules[own] = module
    vars(sys.modules[package]).setdefault(name, module)
