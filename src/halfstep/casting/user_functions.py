"""Functions of the user's own: their arguments are cast while op casting is on.

A decorator makes a new function; a registration replaces an attribute of a module or class, now or later used, and can
be undone in any order, for the attribute holds one wrapper that knows who registered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from ..core.errors import ArgumentTypeError, ArgumentValueError
from ..core.oplists.names import spellings
from . import composites as twins
from . import rules
from . import scopes as ops

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
    """A function whose floating tensor arguments become 16-bit while op casting is on.

    Tensors inside lists, tuples and dicts are cast too; float64 and integers are not. Without op casting, and inside
    ``amp.disable_casts()``, the function is called as it is. Works as a decorator.

    Source: Apex, ``amp.half_function``.
    """
    return _wrap(function, "half")


def float_function(function: F) -> F:
    """A function whose 16-bit tensor arguments become fp32 while op casting is on; else as ``half_function``."""
    return _wrap(function, "float")


def promote_function(function: F) -> F:
    """A function whose floating tensor arguments become the widest dtype among them; else as ``half_function``."""
    return _wrap(function, "promote")


def register_half_function(module: Any, name: str) -> Registration:
    """Treat ``module.name`` as if it were decorated with ``half_function``, from now on.

    Args:
        module: a module, class, or any object with attributes; of torch too.
        name: the attribute, a function or method.

    Returns:
        The registration, whose ``remove()`` undoes it. The latest registration of one attribute is in force.

    Raises:
        ArgumentValueError: if there is no such attribute.
        ArgumentTypeError: if it cannot be called.
    """
    return Registration(module, name, "half")


def register_float_function(module: Any, name: str) -> Registration:
    """Treat ``module.name`` as if it were decorated with ``float_function``; else as ``register_half_function``."""
    return Registration(module, name, "float")


def register_promote_function(module: Any, name: str) -> Registration:
    """Treat ``module.name`` as if it were decorated with ``promote_function``; else as ``register_half_function``."""
    return Registration(module, name, "promote")


def _call(rule: str, function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    casting = ops.active()
    if casting is None:
        return function(*args, **kwargs)
    return _RULES[rule](ops.mode_of_thread(), function, args, kwargs, name)


def _wrap(function: F, rule: str) -> F:
    if not callable(function):
        raise ArgumentTypeError(f"amp.{rule}_function decorates a function, not {function!r}.")
    name = getattr(function, "__name__", type(function).__name__)

    @functools.wraps(function)
    def cast(*args: Any, **kwargs: Any) -> Any:
        return _call(rule, function, name, args, kwargs)

    return cast  # type: ignore[return-value]


class _Attribute:
    """One attribute of an owner with registrations on it."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner = owner
        self.name = name
        self.raw: Any = vars(owner).get(name, _ABSENT) if hasattr(owner, "__dict__") else _ABSENT
        self.rules: list[Registration] = []
        function = getattr(owner, name)
        static = isinstance(self.raw, staticmethod)
        by_class = isinstance(self.raw, classmethod)
        inner = self.raw.__func__ if static or by_class else function
        is_torch_op = function in spellings() if getattr(function, "__hash__", None) else False

        @functools.wraps(inner)
        def cast(*args: Any, **kwargs: Any) -> Any:
            rule = self.rules[-1].rule
            if is_torch_op:
                return _call(rule, functools.partial(_as_it_is, function), name, args, kwargs)
            return _call(rule, inner, name, args, kwargs)

        setattr(owner, name, staticmethod(cast) if static else classmethod(cast) if by_class else cast)
        twins.forget()

    def put_back(self) -> None:
        if self.raw is _ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.raw)
        twins.forget()


_ABSENT: Any = object()
_attributes: dict[tuple[int, str], _Attribute] = {}


class Registration:
    """One call of ``register_*_function``. ``remove()`` undoes it; it is also a context manager that does so."""

    def __init__(self, module: Any, name: str, rule: str) -> None:
        if not hasattr(module, name):
            where = getattr(module, "__name__", repr(module))
            raise ArgumentValueError(f"No function named {name} in {where}; nothing was registered.")
        if not callable(getattr(module, name)):
            raise ArgumentTypeError(f"{name} of {module!r} is no function: {getattr(module, name)!r}.")
        self.rule = rule
        self._key = (id(module), name)
        if self._key not in _attributes:
            _attributes[self._key] = _Attribute(module, name)
        _attributes[self._key].rules.append(self)

    def remove(self) -> None:
        """Undo the registration; a second call does nothing."""
        attribute = _attributes.get(self._key)
        if attribute is None or self not in attribute.rules:
            return
        attribute.rules.remove(self)
        if not attribute.rules:
            _attributes.pop(self._key).put_back()

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


def _as_it_is(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """An op of torch under a rule of the user's: the op lists have no say."""
    with ops.PLAIN:
        return function(*args, **kwargs)
