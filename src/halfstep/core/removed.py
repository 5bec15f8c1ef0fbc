"""A table of the arguments and names of earlier versions of halfstep, with their replacements."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

from .errors import ArgumentTypeError, RemovedNameError

__all__ = ["raise_removed", "removed_arguments", "what_replaces"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

_REMOVED: dict[str, str] = {
    "keep_casts=": 'Leave it out: forward passes cast fp32 weights. opt_level="O2" has 16-bit weights, and casts none.',
    "amp.clear_casts": "Leave the call out: no cast of a weight outlives an iteration.",
    "offload=": "Use torchao's CPUOffloadOptimizer under O2 with plain masters: docs/how-to/offload-state.md.",
    "optimizers.GradientRelease.accumulate": "A step has one backward pass. To accumulate, do not attach.",
}
"""Each removed argument (``"keep_casts="``) or name (``"amp.clear_casts"``), with its replacement."""


def removed_arguments(*names: str, **spellings: str) -> Callable[[_Function], _Function]:
    """Decorate a function so that a removed argument raises an error that names its replacement.

    Args:
        names: the arguments, without ``=``; each has a row in the table above.
        spellings: other names of arguments, as other libraries spell them, each with the name that the function has.
    """

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for name in kwargs.keys() & set(names):
                raise ArgumentTypeError(f"{function.__qualname__} no longer takes {name}=. {_REMOVED[f'{name}=']}")
            respelled = {own: kwargs.pop(other) for other, own in spellings.items() if other in kwargs}
            return function(*args, **kwargs, **respelled)

        return cast(_Function, call)

    return decorate


def what_replaces(name: str) -> str | None:
    """Return the advice for a removed argument, such as ``"keep_casts="``, or name; None if it was not removed."""
    return _REMOVED.get(name)


def raise_removed(name: str) -> None:
    """Raise for a removed public name, and do nothing for every other name.

    Args:
        name: the name with its module, such as ``"amp.clear_casts"``.

    Raises:
        RemovedNameError: if the name was removed; an ``AttributeError``, so that ``hasattr`` is False.
        ImportError: instead, if the caller of ``__getattr__`` is the import system: ``from halfstep.amp import name``.
            It drops an ``AttributeError`` with its message.
    """
    if name in _REMOVED:
        imports = sys._getframe(2).f_globals.get("__name__") == "importlib._bootstrap"
        raise (ImportError if imports else RemovedNameError)(f"halfstep.{name} was removed. {_REMOVED[name]}")
