"""Functions that torch implements in Python, such as ``F.gumbel_softmax``, run so that the ops inside are cast.

torch hands such a function to the mode as a whole, with the mode off. Calling it with the mode on would hand it to the
mode again, forever. So a copy of the function runs: the same code with its module's globals, except that
``has_torch_function`` ("does a mode want this call?") returns False. The functions that it calls do reach the mode.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from ..torch_internals.torch_compat import pop_function_mode, push_function_mode
from .dispatch import CastMode, Rule

__all__ = ["composite_rule", "has_question", "is_composite_of"]

_QUESTIONS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


class _Globals(dict[str, Any]):
    """The current globals of a module, except that ``has_torch_function`` and its variants return False."""

    def __init__(self, own: dict[str, Any]) -> None:
        super().__init__(dict.fromkeys(_QUESTIONS, lambda *_: False))
        self._own = own

    def __missing__(self, name: str) -> Any:
        return self._own[name]

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self._own


def is_composite_of(func: Callable[..., Any], listed: frozenset[str]) -> bool:
    """True if a callable is a Python function that calls one of the listed ops."""
    return (
        isinstance(func, types.FunctionType)
        and has_question(func)
        and not listed.isdisjoint(_names_inside(func) - {func.__name__})
    )


def has_question(func: types.FunctionType) -> bool:
    """True if a Python function asks if a mode wants its call, and is no method around the op of its own name."""
    # A method of torch.Tensor with `super` calls the op of its own name, which would come to the mode again.
    return "super" not in func.__code__.co_names and not set(_QUESTIONS).isdisjoint(func.__code__.co_names)


@functools.cache
def _names_inside(func: types.FunctionType) -> frozenset[str]:
    """Return the names that a function calls, directly or through other functions of its module."""
    found, todo = {func}, [func]
    while todo:
        inner = map(func.__globals__.get, todo.pop().__code__.co_names)
        new = {f for f in inner if isinstance(f, types.FunctionType) and f.__module__ == func.__module__} - found
        found |= new
        todo += new
    return frozenset(name for each in found for name in each.__code__.co_names)


@functools.cache
def composite_rule(func: Any) -> Rule:
    """Return the rule that runs a copy of the function with the mode on.

    The copy does not offer itself to modes. The functions that it calls do.
    """
    scope = _Globals(func.__globals__)
    copy = types.FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__

    def run(mode: CastMode, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        push_function_mode(mode)
        try:
            return copy(*args, **kwargs)
        finally:
            pop_function_mode()

    return run
