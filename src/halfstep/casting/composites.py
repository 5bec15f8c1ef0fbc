"""Python composites of torch, such as ``F.gumbel_softmax``, run so that the ops inside them are cast as well.

torch hands such a function to the mode as a whole, with the mode off. Calling it again with the mode on would hand it
over again, forever. So it is run as a twin: the same code, in a copy of its globals where "does a mode want this call?"
is answered with no. The functions it calls ask for themselves and reach the mode.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.overrides import _pop_mode, _push_mode

if TYPE_CHECKING:
    from .mode import CastMode
    from .rules import Rule

__all__ = ["forget", "needs_twin", "twin_of", "twin_rule"]

_QUESTIONS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_OPERATORS = {"@": "matmul", "**": "pow"}


_scopes: dict[str, dict[str, Any]] = {}


def _no(*_: Any) -> bool:
    return False


@functools.cache
def _asks(func: Callable[..., Any]) -> bool:
    return isinstance(func, types.FunctionType) and any(name in func.__code__.co_names for name in _QUESTIONS)


@functools.cache
def _names_inside(func: types.FunctionType) -> frozenset[str]:
    """The names that a function calls, through the Python functions of its module."""
    seen: set[types.CodeType] = set()
    names: set[str] = set()
    todo = [func]
    while todo:
        current = todo.pop()
        if current.__code__ in seen:
            continue
        seen.add(current.__code__)
        for name in current.__code__.co_names:
            names.add(name)
            inner = current.__globals__.get(name)
            if isinstance(inner, types.FunctionType) and inner.__module__ == func.__module__:
                todo.append(inner)
        for instruction in dis.get_instructions(current.__code__):
            if instruction.opname in ("BINARY_OP", "BINARY_MATRIX_MULTIPLY", "BINARY_POWER"):
                names.add(_OPERATORS.get(instruction.argrepr.rstrip("="), ""))
                names.add({"BINARY_MATRIX_MULTIPLY": "matmul", "BINARY_POWER": "pow"}.get(instruction.opname, ""))
    return frozenset(names)


def needs_twin(func: Callable[..., Any], listed: frozenset[str]) -> bool:
    """Whether a callable is a Python composite with one of the listed ops inside."""
    if not _asks(func):
        return False
    assert isinstance(func, types.FunctionType)
    return not listed.isdisjoint(_names_inside(func) - {func.__name__})


@functools.cache
def twin_of(func: types.FunctionType) -> types.FunctionType:
    """The function, deaf to modes for itself but not for what it calls."""
    scope = _scopes.get(func.__module__)
    if scope is None:
        scope = _scopes[func.__module__] = {**func.__globals__, **dict.fromkeys(_QUESTIONS, _no)}
    twin = types.FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    twin.__kwdefaults__ = func.__kwdefaults__
    return twin


def forget() -> None:
    """Someone replaced a function in a module: bring the copies of globals up to date."""
    for name, scope in _scopes.items():
        scope.update(vars(sys.modules[name]), **dict.fromkeys(_QUESTIONS, _no))


def twin_rule(func: Callable[..., Any]) -> Rule:
    """The rule that runs a composite as its twin with the mode on."""
    assert isinstance(func, types.FunctionType)
    twin = twin_of(func)

    def run(mode: CastMode, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        _push_mode(mode)
        try:
            return twin(*args, **kwargs)
        finally:
            _pop_mode()

    return run
