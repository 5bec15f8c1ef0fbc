"""Arguments that a function also takes under the name that another library gives them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

__all__ = ["aliases"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def aliases(**names: str) -> Callable[[_Function], _Function]:
    """Decorate a function so that it also takes arguments under other names.

    Args:
        names: each alias, with the name of the argument in the function: ``level="opt_level"``.
    """

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            respelled = {own: kwargs.pop(alias) for alias, own in names.items() if alias in kwargs}
            return function(*args, **kwargs, **respelled)

        return cast(_Function, call)

    return decorate
