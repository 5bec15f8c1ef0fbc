"""Casts for the arguments of user functions while op casting is on, as decorators and registrations.

A decorator returns a new function. A registration replaces an attribute of a module or class with a wrapper. All
registrations of an attribute share one wrapper, so that user code can remove them in any order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from ..core.errors import ArgumentTypeError, ArgumentValueError
from ..core.oplists.names import spellings
from . import rules
from .current import thread
from .scope import NO_CASTING, active_casting

__all__ = [
    "Registration",
    "float_function",
    "half_function",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
]

F = TypeVar("F", bound=Callable[..., Any])

_RULES: dict[str, Callable[..., Any]] = {"half": rules.to_half, "float": rules.to_float, "promote": rules.promote}


def half_function(function: F) -> F:
    """Wrap a function so that its floating tensor arguments are cast to 16 bits while op casting is on.

    Tensors in lists, tuples and dicts are cast as well; float64 and integer tensors are not. Without op casting, and in
    ``amp.disable_casts()``, the function gets its arguments unchanged. Works as a decorator.

    Source: Apex, ``amp.half_function``.
    """
    return _wrap(function, "half")


def float_function(function: F) -> F:
    """Wrap a function so that its 16-bit tensor arguments are cast to fp32; see ``half_function``."""
    return _wrap(function, "float")


def promote_function(function: F) -> F:
    """Wrap a function so that its floating tensor arguments are cast to their widest dtype; see ``half_function``."""
    return _wrap(function, "promote")


def register_half_function(module: Any, name: str) -> Registration:
    """Treat ``module.name`` as if it were decorated with ``half_function``, from now on.

    Args:
        module: a module, class, or any object with attributes, including torch's modules.
        name: the name of the attribute, a function or method.

    Returns:
        The registration, whose ``remove()`` undoes it. The latest registration of an attribute decides.

    Raises:
        ArgumentValueError: if ``module`` has no such attribute.
        ArgumentTypeError: if the attribute is not callable.
    """
    return Registration(module, name, "half")


def register_float_function(module: Any, name: str) -> Registration:
    """Treat ``module.name`` as if it were decorated with ``float_function``; see ``register_half_function``."""
    return Registration(module, name, "float")


def register_promote_function(module: Any, name: str) -> Registration:
    """Treat ``module.name`` as if it were decorated with ``promote_function``; see ``register_half_function``."""
    return Registration(module, name, "promote")


def _call(rule: str, function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if active_casting() is None:
        return function(*args, **kwargs)
    return _RULES[rule](name, thread.mode, function, args, kwargs)


def _wrap(function: F, rule: str) -> F:
    if not callable(function):
        raise ArgumentTypeError(f"amp.{rule}_function decorates a function, not {function!r}.")
    name = getattr(function, "__name__", type(function).__name__)

    @functools.wraps(function)
    def cast(*args: Any, **kwargs: Any) -> Any:
        return _call(rule, function, name, args, kwargs)

    return cast  # type: ignore[return-value]


class _Attribute:
    """An attribute with registrations; its wrapper refers to this object, so that later registrations find it."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner = owner
        self.name = name
        self.raw: Any = vars(owner).get(name, _ABSENT) if hasattr(owner, "__dict__") else _ABSENT
        self.rules: list[Registration] = []
        function = getattr(owner, name)
        static, by_class = (isinstance(self.raw, kind) for kind in (staticmethod, classmethod))
        inner = self.raw.__func__ if static or by_class else function
        is_torch_op = function in spellings() if getattr(function, "__hash__", None) else False

        def function_without_lists(*args: Any, **kwargs: Any) -> Any:
            with NO_CASTING:  # the registration decides, not the op lists
                return function(*args, **kwargs)

        @functools.wraps(inner)
        def cast(*args: Any, **kwargs: Any) -> Any:
            rule = self.rules[-1].rule
            return _call(rule, function_without_lists if is_torch_op else inner, name, args, kwargs)

        cast.attribute = self  # type: ignore[attr-defined]
        setattr(owner, name, staticmethod(cast) if static else classmethod(cast) if by_class else cast)


_ABSENT: Any = object()


class Registration:
    """A registration by ``register_*_function``, undone by ``remove()`` or at the end of a ``with`` block."""

    def __init__(self, module: Any, name: str, rule: str) -> None:
        if not hasattr(module, name):
            where = getattr(module, "__name__", repr(module))
            raise ArgumentValueError(f"No function named {name} in {where}; nothing was registered.")
        function = getattr(module, name)
        if not callable(function):
            raise ArgumentTypeError(f"{name} of {module!r} is not callable: {function!r}.")
        self.rule = rule
        found: Any = getattr(getattr(function, "__func__", function), "attribute", None)
        same = isinstance(found, _Attribute) and found.owner is module and found.name == name
        self._attribute: _Attribute = found if same else _Attribute(module, name)
        self._attribute.rules.append(self)

    def remove(self) -> None:
        """Undo the registration; a second call does nothing."""
        at = self._attribute
        if self in at.rules:
            at.rules.remove(self)
            if not at.rules and at.raw is _ABSENT:
                delattr(at.owner, at.name)
            elif not at.rules:
                setattr(at.owner, at.name, at.raw)

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()
