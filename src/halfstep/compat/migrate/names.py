"""The name in halfstep of each name of Apex."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType

__all__ = [
    "EXTENSIONS",
    "MODULES",
    "Problem",
    "exists",
    "is_apex",
    "module_of",
    "moved",
    "moved_import",
    "moved_use",
    "resolves",
]

Problem = tuple[int, str]
"""A line number, and a change that the codemod could not make there."""

EXTENSIONS = ("amp_C", "apex_C", "syncbn")

MODULES = {
    "apex": "halfstep",
    "apex.amp": "halfstep.amp",
    "apex.amp._amp_state": "halfstep.amp",
    "apex.fp16_utils": "halfstep.fp16_utils",
    "apex.parallel": "halfstep.parallel",
    "apex.parallel.LARC": "halfstep.parallel",
    "apex.parallel.distributed": "halfstep.apex.parallel.distributed",
    "apex.parallel.sync_batchnorm": "halfstep.parallel",
    "apex.parallel.optimized_sync_batchnorm": "halfstep.parallel",
    "apex.parallel.multiproc": "halfstep.parallel.multiproc",
    "apex.multi_tensor_apply": "halfstep.multi_tensor",
    "amp_C": "halfstep.multi_tensor",
    **{
        f"apex.{name}": f"halfstep.apex.{name}"
        for name in "RNN contrib fused_dense mlp normalization optimizers pyprof reparameterization".split()  # noqa: SIM905
    },
    "apex_C": "halfstep.apex.apex_C",
    "syncbn": "halfstep.apex.syncbn",
}
"""Modules of Apex -> modules of halfstep with the same names; submodules map to submodules.

Each name maps to the same object as under ``halfstep run``, except for ``initialize`` and ``init``: the codemod adds
``float16`` to their arguments.
"""

_KEPT_AS_MODULES = {"apex.parallel.LARC": "halfstep.apex.parallel"}
"""``from apex.parallel import LARC`` imports a module; ``halfstep.parallel.LARC`` is the class."""


def is_apex(name: str) -> bool:
    """True if a dotted name begins with Apex or an extension of Apex."""
    return name.partition(".")[0] in ("apex", *EXTENSIONS)


def moved(name: str) -> str:
    """Return the dotted name in halfstep of a module of Apex, or of an attribute of a module.

    ``apex.amp.initialize`` -> ``halfstep.amp.initialize``. Names that only old scripts use are in ``halfstep.apex``.
    """
    new, old = _moved(name), f"halfstep.{name}"
    return old if name.startswith("apex.") and not resolves(new) and resolves(old) else new


def _moved(name: str) -> str:
    known, rest = name, ""
    while known not in MODULES:
        known, _, last = known.rpartition(".")
        rest = f".{last}{rest}"
    if known == "apex" and rest:
        return f"halfstep.apex{rest}"
    return MODULES[known] + rest


def moved_import(module: str, name: str) -> tuple[str, str]:
    """Return the module and the name that replace ``from module import name``."""
    if f"{module}.{name}" in _KEPT_AS_MODULES:
        return _KEPT_AS_MODULES[f"{module}.{name}"], name
    if f"{module}.{name}" in MODULES and (module, name) != ("apex.amp", "_amp_state"):
        parent, _, last = MODULES[f"{module}.{name}"].rpartition(".")
        return parent, last
    parent, old = moved(module), f"halfstep.{module}"
    return (old, name) if not exists(parent, name) and exists(old, name) else (parent, name)


def moved_use(name: str) -> str:
    """Return the dotted name in halfstep of an expression; ``_amp_state`` means the object, not Apex's module."""
    state = "apex.amp._amp_state"
    return f"halfstep.amp._amp_state{name.removeprefix(state)}" if f"{name}.".startswith(f"{state}.") else moved(name)


def module_of(name: str) -> str:
    """Return the module of a dotted name of halfstep, which may be the name itself."""
    return _find(name)[0]


def resolves(name: str) -> bool:
    """True if a dotted name of halfstep exists."""
    return _find(name)[1]


@functools.cache
def exists(module: str, name: str | None = None) -> bool:
    """True if halfstep has a module, and ``name``, if given, can be imported from it."""
    if not _is_module(module) or name in (None, "*"):
        return _is_module(module)
    return _get(importlib.import_module(module), str(name)) is not _NOTHING or _is_module(f"{module}.{name}")


@functools.cache
def _find(name: str) -> tuple[str, bool]:
    place, *rest = name.split(".")
    module = importlib.import_module(place)
    for i, part in enumerate(rest):
        value = _get(module, part)
        if (value is _NOTHING or isinstance(value, ModuleType)) and _is_module(f"{place}.{part}"):
            place = f"{place}.{part}"
            module = importlib.import_module(place)
            continue
        return place, value is not _NOTHING and _has(value, rest[i + 1 :])
    return place, True


_NOTHING = object()


def _get(value: object, name: str) -> object:
    try:
        return getattr(value, name, _NOTHING)
    except ImportError:  # halfstep refuses the name with a message
        return _NOTHING


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False


def _has(value: object, names: list[str]) -> bool:
    """True if a module or class has an attribute. True for any other object, whose attributes are unknown."""
    for name in names:
        if not isinstance(value, (ModuleType, type)):
            return True
        value = _get(value, name)
        if value is _NOTHING:
            return False
    return True
