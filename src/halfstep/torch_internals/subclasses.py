"""Subclasses made at run time: a user's class with a halfstep mixin whose methods take precedence.

This module does not refer to them, so such a class lives no longer than its last instance.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

__all__ = ["Mixin", "subclass_with", "superclass_of"]


class Mixin:
    """The base class of all mixins."""

    def __init_subclass__(cls) -> None:
        """Do nothing: a user's class may keep a registry of its subclasses, to which these should not be added."""


def subclass_with(mixin: type[Mixin], base: type, methods: dict[str, Any]) -> type:
    """Make a subclass of a user's class and a mixin, with the name of the user's class and additional methods.

    The user's class is the first base, because the first base determines the layout of instances: Python refuses to
    assign a class with another layout, and ``class Mine(ABC, Optimizer)`` has the layout of ``ABC``. A metaclass moves
    the mixin before it in the method resolution order.
    """

    def mro(cls: Any) -> list[type]:
        moved = mixin.__mro__[:-1] if cls.__bases__ == (base, mixin) else ()
        return [cls, *moved, *(each for each in super(kind, cls).mro()[1:] if each not in moved)]

    kind: Any = type(type(base).__name__, (type(base),), {"mro": mro})
    subclasses: list[type] = type.__subclasses__(base)  # a class holds its subclasses weakly
    known = (cls for cls in subclasses if cls.__bases__ == (base, mixin))
    names: dict[str, Any] = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    own = [each for cls in base.__mro__ for each in vars(cls).values() if isinstance(each, FunctionType)]
    if any({"super", "__class__"} <= {*each.__code__.co_names} for each in own):
        names["__class__"] = _CLASS
    return next(known, None) or kind(base.__name__, (base, mixin), {**names, **methods})


# For `super(self.__class__, self)`, as in Horovod's optimizers, `__class__` is the user's class.
_CLASS = property(lambda self: superclass_of(type(self), Mixin), vars(object)["__class__"].__set__)


def superclass_of(cls: type, mixin: type[Mixin]) -> type:
    """Return the user's class behind a class from ``subclass_with``; any other class unchanged."""
    # The last base of a class from `subclass_with` is the mixin, whose only base is `Mixin`.
    return cls.__bases__[0] if issubclass(last := cls.__bases__[-1], mixin) and last.__mro__[-2] is Mixin else cls
