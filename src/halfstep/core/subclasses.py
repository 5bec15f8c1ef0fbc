"""Subclasses made on the fly: the class of a user with a mixin of ours, whose methods go first.

Nothing here refers to them, so such a class lives no longer than its last instance.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

__all__ = ["Mixin", "subclass_with", "superclass_of"]


class Mixin:
    """The base of all mixins."""

    def __init_subclass__(cls) -> None:
        """Do nothing: a user's class may keep a register of its subclasses, and these do not belong there."""


def subclass_with(mixin: type[Mixin], base: type, methods: dict[str, Any]) -> type:
    """The subclass of a user's class and a mixin, with the name of the former and more methods.

    The user's class is the first base, because the first base decides on the layout of instances: Python sets no class
    with another layout, and ``class Mine(ABC, Optimizer)`` has that of ``ABC``. A metaclass puts the mixin before it.
    """

    def mro(cls: Any) -> list[type]:
        moved = mixin.__mro__[:-1] if cls.__bases__ == (base, mixin) else ()
        return [cls, *moved, *(each for each in super(kind, cls).mro()[1:] if each not in moved)]

    kind: Any = type(type(base).__name__, (type(base),), {"mro": mro})
    subclasses: list[type] = type.__subclasses__(base)  # to which a class refers weakly
    known = (cls for cls in subclasses if cls.__bases__ == (base, mixin))
    names: dict[str, Any] = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    own = [each for cls in base.__mro__ for each in vars(cls).values() if isinstance(each, FunctionType)]
    if any({"super", "__class__"} <= {*each.__code__.co_names} for each in own):
        names["__class__"] = _CLASS
    return next(known, None) or kind(base.__name__, (base, mixin), {**names, **methods})


# To `super(self.__class__, self)`, as Horovod's optimizers have it, the class of an instance is the one that it is in.
_CLASS = property(lambda self: superclass_of(type(self), Mixin), vars(object)["__class__"].__set__)


def superclass_of(cls: type, mixin: type[Mixin]) -> type:
    """The user's class of which ``subclass_with`` made a class; any other class as it is."""
    # The last base of a class that `subclass_with` made is the mixin, and above a mixin is nothing but `Mixin`.
    return cls.__bases__[0] if issubclass(last := cls.__bases__[-1], mixin) and last.__mro__[-2] is Mixin else cls
