"""Submodules that only name what another module has: ``apex.optimizers.fused_adam`` holds ``FusedAdam``.

Apex had a file for each. Here a module lists them in a table, and becomes a package by that. Names of Apex that are not
here are in a table, too: who asks for one is told what to use.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from ..core.errors import MissingNameError

__all__ = ["add_submodules", "refusing"]


def add_submodules(
    package: str,
    contents: Mapping[str, str],
    *,
    also: Mapping[str, object] | None = None,
    refused: Mapping[str, Mapping[str, str]] | None = None,
) -> None:
    """Make submodules of a module that is being imported. An attribute that the module has already stays.

    Args:
        package: the ``__name__`` of the module.
        contents: for each submodule the names it has, with spaces between. They are taken from the module.
        also: names that the module itself does not have.
        refused: for each submodule the names that are not here, with spaces between, and what to use instead.
    """
    parent = sys.modules[package]
    vars(parent).setdefault("__path__", [])
    known = {**vars(parent), **(also or {})}
    for name, names in contents.items():
        values = {each: known[each] for each in names.split()}
        add_submodule(package, name, values, refused=(refused or {}).get(name, {}))


def add_submodule(
    package: str, name: str, values: Mapping[str, object], *, refused: Mapping[str, str] | None = None
) -> None:
    """Make one submodule of a package that is being imported.

    Args:
        package: the name of the package.
        name: of the submodule, in the package.
        values: what it has.
        refused: as for ``add_submodules``, of this one.
    """
    own = f"{package}.{name}"
    module = ModuleType(own, f"``{own.removeprefix('halfstep.compat.')}``.")
    module.__spec__ = ModuleSpec(own, None)
    vars(module).update(values, __all__=[*values], __getattr__=refusing(own, refused or {}))
    sys.modules[own] = module
    vars(sys.modules[package]).setdefault(name, module)


def refusing(module: str, refused: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module that says of some names what to use instead.

    It raises an ImportError and no AttributeError: of that, ``from module import name`` would not show the message.
    """
    instead = {name: told for names, told in refused.items() for name in names.split()}

    def getattr_(name: str) -> NoReturn:
        if name in instead:
            shown = module.removeprefix("halfstep.compat.")
            raise MissingNameError(f"{shown}.{name} is not in halfstep. {instead[name]}", name=name)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return getattr_
