"""Where the names of Apex are in halfstep."""

from __future__ import annotations

import importlib
import importlib.util

__all__ = ["MODULES", "exists", "is_apex", "moved"]

MODULES = {
    "apex": "halfstep",
    "apex.amp": "halfstep.amp",
    "apex.amp._amp_state": "halfstep.amp",
    "apex.fp16_utils": "halfstep.fp16_utils",
    "apex.optimizers": "halfstep.optimizers",
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
        for name in ("RNN", "contrib", "fused_dense", "mlp", "normalization", "reparameterization")
    },
    "apex_C": "halfstep.apex.apex_C",
    "syncbn": "halfstep.apex.syncbn",
}
"""A module of Apex -> the one that has its names; a module below one of these is below its counterpart."""

_KEPT_AS_MODULES = {"apex.parallel.LARC": "halfstep.apex.parallel"}
"""``from apex.parallel import LARC`` imports a module; ``halfstep.parallel.LARC`` is the class."""


def is_apex(name: str) -> bool:
    """Whether a dotted name begins with Apex or one of its extensions."""
    return name.partition(".")[0] in ("apex", "amp_C", "apex_C", "syncbn")


def moved(name: str) -> str:
    """The dotted name in halfstep of a module, or of something in a module, of Apex.

    ``apex.amp.initialize`` -> ``halfstep.amp.initialize``.
    """
    known, rest = name, ""
    while known not in MODULES:
        known, _, last = known.rpartition(".")
        rest = f".{last}{rest}"
    if known == "apex" and rest:
        return f"halfstep.apex{rest}"
    return MODULES[known] + rest


def moved_import(module: str, name: str) -> tuple[str, str]:
    """What ``from module import name`` becomes: the module and the name to import from it."""
    if f"{module}.{name}" in _KEPT_AS_MODULES:
        return _KEPT_AS_MODULES[f"{module}.{name}"], name
    if f"{module}.{name}" in MODULES and (module, name) != ("apex.amp", "_amp_state"):
        parent, _, last = MODULES[f"{module}.{name}"].rpartition(".")
        return parent, last
    return moved(module), name


def exists(module: str, name: str | None = None) -> bool:
    """Whether halfstep has a module, or a name in it."""
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return False
    if found is None or name is None or name == "*":
        return found is not None
    return hasattr(importlib.import_module(module), name) or exists(f"{module}.{name}")
