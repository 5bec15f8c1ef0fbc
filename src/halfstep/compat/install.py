"""``install``, after which ``import apex`` finds halfstep: one module under two names."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType

from ..core.errors import UsageError
from .migrate.names import EXTENSIONS
from .missing import refuse_missing

__all__ = ["install", "second_name", "uninstall"]

_TOP = {"apex": "halfstep.compat.apex", **{name: f"halfstep.compat.apex.{name}" for name in EXTENSIONS}}
"""Apex's top-level modules, each with the module of halfstep that replaces it."""


class SecondNames(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A finder of modules and their submodules under second names. It finds the same modules, not copies.

    Args:
        names: the module's name for each second name.
    """

    def __init__(self, names: dict[str, str]) -> None:
        self.names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for a second name of an existing module; None for any other name."""
        ours = self._ours(fullname)
        own = None if ours is None else importlib.util.find_spec(ours)
        if own is None:
            return None
        is_package = own.submodule_search_locations is not None
        return importlib.machinery.ModuleSpec(fullname, self, origin=own.origin, is_package=is_package)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return the module of halfstep."""
        ours = self._ours(spec.name)
        assert ours is not None
        module = importlib.import_module(ours)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own spec. The module has already run."""
        assert module.__spec__ is not None
        second = module.__spec__.name
        module.__spec__ = module.__spec__.loader_state
        # Give submodules that are already imported their second names now. A later import would set the submodule as an
        # attribute, over an attribute of the same name: ``amp._amp_state`` is both an object and a module.
        for name, below in list(sys.modules.items()):
            if name.startswith(f"{module.__name__}."):
                sys.modules.setdefault(second + name[len(module.__name__) :], below)

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code of the module, for ``python -m`` with a second name."""
        own = importlib.util.find_spec(self._ours(fullname) or fullname)
        assert own is not None
        assert isinstance(own.loader, importlib.abc.InspectLoader)
        return own.loader.get_code(own.name)

    def _ours(self, fullname: str) -> str | None:
        for name, ours in self.names.items():
            if fullname == name or fullname.startswith(f"{name}."):
                return ours + fullname[len(name) :]
        return None


def second_name(name: str, module: ModuleType) -> None:
    """Make a module and its submodules importable under a second name."""
    sys.meta_path.insert(0, SecondNames({name: module.__name__}))
    sys.modules[name] = module


_finder = SecondNames(_TOP)


def install(force: bool = False) -> None:
    """Make ``import apex``, any ``apex.X`` and Apex's extensions (``amp_C``...) find halfstep.

    An installed Apex without ``amp``, such as the current release, keeps its names, and halfstep adds the missing ones.

    Args:
        force: replace an installed Apex that has ``amp``.

    Raises:
        UsageError: if an Apex with ``amp`` is installed or imported, unless ``force``.
    """
    refuse_missing()
    if _finder in sys.meta_path:
        return
    if not force and importlib.util.find_spec("apex") is not None:
        if importlib.util.find_spec("apex.amp") is not None:
            raise UsageError(
                "An Apex that has amp is installed, and a script that imports it gets it. Uninstall it, or pass "
                "force=True to have halfstep in its place."
            )
        sys.meta_path.append(_finder)  # last, so that it finds only names that Apex lacks
        return
    for name in [name for name in sys.modules if name.partition(".")[0] in _TOP]:
        del sys.modules[name]
    sys.meta_path.insert(0, _finder)


def uninstall() -> None:
    """Undo ``install``. Names that user code has already imported stay valid."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in _TOP and getattr(module, "__name__", "").startswith("halfstep."):
            del sys.modules[name]
