"""Classes made on the fly: below a class of a user's, with methods of ours before its own.

Nothing here refers to them, so a class that a function has made goes when the last of its instances has gone.
"""

from __future__ import annotations

from typing import Any

__all__ = ["Ours", "subclass_with", "superclass_of"]


class Ours:
    """The base of classes with methods of ours."""

    def __init_subclass__(cls) -> None:
        """Nothing: the user's own may keep a register of classes, to which what is made here does not belong."""


def subclass_with(ours: type[Ours], base: type, names: dict[str, Any]) -> type:
    """The class with methods of ours below a user's, which has the name of the user's; ``names`` are more methods."""
    bases = ours, base
    below: list[type] = type.__subclasses__(base)  # to which a class refers weakly
    there = (cls for cls in below if cls.__bases__ == bases)
    like = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    return next(there, None) or type(base.__name__, bases, {**like, **names})


def superclass_of(cls: type, ours: type[Ours]) -> type:
    """The user's class above one that was made; any other class as it is."""
    first = cls.__bases__[0]  # one that was made here, if the user has made a class below that
    return cls.__bases__[1] if issubclass(first, ours) and first.__mro__[-2] is Ours else cls
