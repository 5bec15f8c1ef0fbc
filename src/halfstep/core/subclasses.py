"""Subclasses made on the fly: a class of a user's with a mixin of ours before it.

Nothing here refers to them, so such a class lives no longer than its last instance.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

__all__ = ["Mixin", "subclass_with", "superclass_of"]


class Mixin:
    """The base of all mixins."""

    def __init_subclass__(cls) -> None:
        """Nothing: a class of a user's may keep a register of its subclasses, and these do not belong there."""


def subclass_with(mixin: type[Mixin], base: type, methods: dict[str, Any]) -> type:
    """The subclass of a mixin and a user's class, with the name of the latter and more methods."""
    bases = mixin, base
    known = (cls for cls in type.__subclasses__(base) if cls.__bases__ == bases)  # to which a class refers weakly
    names: dict[str, Any] = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    own = [each for cls in base.__mro__ for each in vars(cls).values() if isinstance(each, FunctionType)]
    if any({"super", "__class__"} <= {*each.__code__.co_names} for each in own):
        names["__class__"] = _CLASS
    return next(known, None) or type(base.__name__, bases, {**names, **methods})


# To `super(self.__class__, self)`, as Horovod's optimizers have it, the class of an instance is the one that it is in.
_CLASS = property(lambda self: superclass_of(type(self), Mixin), vars(object)["__class__"].__set__)


def superclass_of(cls: type, mixin: type[Mixin]) -> type:
    """The user's class of which ``subclass_with`` made a class; any other class as it is."""
    # If the user has made a class below ours, the first base is ours. Above that are classes of the user, and above a
    # mixin is nothing but `Mixin`.
    first = cls.__bases__[0]
    return cls.__bases__[1] if issubclass(first, mixin) and first.__mro__[-2] is Mixin else cls
