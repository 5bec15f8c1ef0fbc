"""The switch for op casts that Apex's handles of 2018 and 2019 share."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from ..casting.current import clear_cache
from ..casting.scope import active_casting, disable_casts, join_session, session_casting

__all__ = ["CastingSwitch"]


class CastingSwitch:
    """``handle._is_active``, which some scripts set to False and back instead of using ``disable_casts``."""

    _off: AbstractContextManager[Any] | None = None
    _disable_casts = disable_casts = staticmethod(disable_casts)
    _clear_cache = staticmethod(clear_cache)

    def is_active(self) -> bool:
        """True if this thread casts ops."""
        join_session()
        return session_casting() is not None and active_casting() is not None

    @property
    def _is_active(self) -> bool:
        return self.is_active()

    @_is_active.setter
    def _is_active(self, active: bool) -> None:
        """Turn op casts in this thread on or off."""
        if not active and self._off is None:
            self._off = disable_casts().__enter__()
        elif active and self._off is not None:
            self._off.__exit__(None, None, None)
            self._off = None
