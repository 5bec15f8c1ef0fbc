"""``apex.amp.lists``: the op lists of O1 as lists of names, which scripts edit before ``initialize``.

They start with the contents of halfstep's lists. Edits apply to every later ``initialize`` at O1 and every later
``init``. Halfstep casts an op however it is called, so a name moved in one of the three modules moves in all three.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from ....core.errors import UsageError
from ....core.oplists import BANNED, OpLists
from ....core.oplists.names import resolve, spellings
from ...submodules import add_submodule

__all__ = ["edited"]

_RULES = {"FP16_FUNCS": "half", "FP32_FUNCS": "float", "CASTS": "promote", "SEQUENCE_CASTS": "sequence-promote"}
_SPACES = {"functional_overrides": torch.nn.functional, "torch_overrides": torch, "tensor_overrides": torch.Tensor}


def _names(space: Any, rule: str) -> list[str]:
    """Return the functions and operators of a namespace whose ops have a rule."""
    known, lists = spellings(), OpLists.default()
    found = []
    for name in dir(space):
        if name.startswith("_") and not name.endswith("__"):
            continue
        function: Any = getattr(space, name, None)
        op, inplace = known.get(function, ("", True)) if callable(function) else ("", True)
        if lists.rule_of(op) == rule and (not inplace or name.startswith("__i")):
            found.append(name)
    return found


def _at_first(space: Any) -> dict[str, list[Any]]:
    lists: dict[str, list[Any]] = {name: _names(space, rule) for name, rule in _RULES.items()}
    return {**lists, "BANNED_FUNCS": [(name, why) for name, why in BANNED.items() if hasattr(space, name)]}


_AT_FIRST = {name: _at_first(space) for name, space in _SPACES.items()}

vars(sys.modules[__name__])["__path__"] = []  # a package, of the modules that follow
for _name, _space in _SPACES.items():
    _lists = {key: list(names) for key, names in _AT_FIRST[_name].items()}
    add_submodule(__name__, _name, {"MODULE": _space, **_lists})


def edited() -> OpLists | None:
    """Return the op lists of O1 with a script's edits; None without edits.

    Raises:
        UsageError: if a script added a name to a list to which halfstep cannot add.
        ArgumentValueError: if an added name is not an op, or was added to two lists.
    """
    added: dict[str, set[str]] = {name: set() for name in _AT_FIRST["torch_overrides"]}
    removed: set[str] = set()
    for module, at_first in _AT_FIRST.items():
        for key, before in at_first.items():
            first, now = (
                set(map(_name_of, before)),
                set(map(_name_of, getattr(sys.modules[f"{__name__}.{module}"], key))),
            )
            added[key] |= {op for name in now - first for op in _ops(_SPACES[module], name)}
            removed |= {op for name in first - now for op in _ops(_SPACES[module], name)}
    default = OpLists.default()
    for key in ("CASTS", "SEQUENCE_CASTS", "BANNED_FUNCS"):
        new = sorted(op for op in added[key] if default.rule_of(op) != _RULES.get(key, "banned"))
        if new:
            raise UsageError(
                f"{', '.join(new)} cannot be added to {key}: it can only lose names. Use "
                "amp.register_promote_function, or an error of your own in the place of a ban."
            )
    white, black = added["FP16_FUNCS"], added["FP32_FUNCS"]
    free = removed.difference(*added.values())
    return OpLists.custom(white, black, free=free) if white or black or free else None


def _name_of(entry: Any) -> Any:
    """Return the name in an entry of a list. An entry for a banned function is a pair of the name and the reason."""
    return entry[0] if isinstance(entry, tuple) else entry


def _ops(space: Any, name: Any) -> tuple[str, ...]:
    """Return the canonical names of the ops that a function of a namespace computes."""
    function: Any = getattr(space, name, None)
    known = spellings().get(function)
    return resolve(name) if known is None else (known[0],)
