"""The precision profiler: time by kind, what 16 bits can still give, and findings with their milliseconds.

It is a room of its own because it reads no numbers of a training, only when its ops begin and end. Its names are
imported when asked for: the command line needs no torch until a script runs.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .answer import Profile as Profile
    from .run import profile as profile

__all__ = ["Profile", "profile"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from .answer import Profile
        from .run import profile

        return Profile if name == "Profile" else profile
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}.")
