"""``install``: ``import apex`` finds halfstep. One module under two names."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType

from ..core.errors import UsageError
from .missing import refuse_missing

__all__ = ["install", "second_name", "uninstall"]

_EXTENSIONS = ("amp_C", "apex_C", "syncbn")
_TOP = {"apex": "halfstep.compat.apex", **{name: f"halfstep.compat.apex.{name}" for name in _EXTENSIONS}}
"""Top-level names of the original, and what stands for them."""


class SecondNames(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules, and everything below them, under second names: the same modules, not copies.

    Args:
        names: the module that stands for each second name.
    """

    def __init__(self, names: dict[str, str]) -> None:
        self.names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A spec for a second name for which there is a module; None for any other."""
        ours = self._ours(fullname)
        own = None if ours is None else importlib.util.find_spec(ours)
        if own is None:
            return None
        is_package = own.submodule_search_locations is not None
        return importlib.machinery.ModuleSpec(fullname, self, origin=own.origin, is_package=is_package)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Our module itself."""
        ours = self._ours(spec.name)
        assert ours is not None
        module = importlib.import_module(ours)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing but keep the module's own spec: it has run already, and has a place of its own."""
        assert module.__spec__ is not None
        second = module.__spec__.name
        module.__spec__ = module.__spec__.loader_state
        # Modules that came with it get their second names at once: a later import would put one in the place of an
        # attribute of the same name, and ``amp._amp_state`` is an object and a module.
        for name, below in list(sys.modules.items()):
            if name.startswith(f"{module.__name__}."):
                sys.modules.setdefault(second + name[len(module.__name__) :], below)

    def get_code(self, fullname: str) -> CodeType | None:
        """The code of our module, for ``python -m`` with a second name."""
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
    """Let a module, and everything below it, be imported under a second name too."""
    sys.meta_path.insert(0, SecondNames({name: module.__name__}))
    sys.modules[name] = module


_finder = SecondNames(_TOP)


def install(force: bool = False) -> None:
    """Let ``import apex``, any ``apex.X`` and Apex's extensions (``amp_C``...) find halfstep from now on.

    An installed Apex that lacks ``amp``, as today's does, is kept and completed: its own names stay.

    Args:
        force: take the place of an Apex that has ``amp``.

    Raises:
        UsageError: if an Apex with ``amp`` is installed or imported, unless ``force``.
    """
    refuse_missing()
    if _finder in sys.meta_path:
        return
    real = _real_apex()
    if real and not force:
        if importlib.util.find_spec("apex.amp") is not None:
            raise UsageError(
                "An Apex that has amp is installed, and a script that imports it gets it. Uninstall it, or pass "
                "force=True to have halfstep in its place."
            )
        sys.meta_path.append(_finder)  # last: only for what it lacks
        return
    for name in [name for name in sys.modules if name.partition(".")[0] in _TOP]:
        del sys.modules[name]
    sys.meta_path.insert(0, _finder)


def uninstall() -> None:
    """Undo ``install``; modules that were imported stay where they were bound."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in _TOP and getattr(module, "__name__", "").startswith("halfstep."):
            del sys.modules[name]


def _real_apex() -> bool:
    return importlib.util.find_spec("apex") is not None
