"""Submodules that only re-export names of another module, such as ``apex.optimizers.fused_adam`` for ``FusedAdam``.

Apex had a file for each submodule. Here a module lists its submodules in a table, which also makes it a package.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType

from .missing import refusing

__all__ = ["add_submodules"]


def add_submodules(package: str, contents: Mapping[str, str], *, also: Mapping[str, object] | None = None) -> None:
    """Make submodules of a module during its import. Existing attributes of the module do not change.

    The module also gets the ``__getattr__`` that refuses missing names.

    Args:
        package: the ``__name__`` of the module.
        contents: the space-separated names of each submodule, which are attributes of the module.
        also: further values by name, which the module does not have.
    """
    parent = sys.modules[package]
    vars(parent).setdefault("__path__", [])
    vars(parent).setdefault("__getattr__", refusing(package))
    known = {**vars(parent), **(also or {})}
    for name, names in contents.items():
        values = {each: known[each] for each in names.split()}
        add_submodule(package, name, values)


def add_submodule(package: str, name: str, values: Mapping[str, object]) -> None:
    """Make one submodule of a package during its import.

    Args:
        package: the name of the package.
        name: the name of the submodule in the package.
        values: the attributes of the submodule.
    """
    own = f"{package}.{name}"
    module = ModuleType(own, f"``{own.removeprefix('halfstep.compat.')}``.")
    module.__spec__ = ModuleSpec(own, None)
    vars(module).update(values, __all__=[*values], __getattr__=refusing(own))
    sys.modules[own] = module
    vars(sys.modules[package]).setdefault(name, module)
