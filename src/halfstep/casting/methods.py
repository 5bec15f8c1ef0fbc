"""The public methods and properties of a model with 16-bit weights, which cast ops as its ``forward`` does.

They run without the hooks of ``forward``. So the model gets a dynamic subclass of its class, whose methods consult the
record of the first passes. Copies and pickles have the subclass too; other models of the class do not.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import nn

from ..torch_internals.subclasses import Mixin, subclass_with, superclass_of
from ..torch_internals.torch_compat import forward_hooks
from .current import thread
from .first_passes import FirstPasses

__all__ = ["unwatch_methods", "watch_methods"]

_FRAMEWORKS = ("accelerate", "builtins", "lightning", "peft", "pytorch_lightning", "torch", "transformers", "typing")
"""Packages whose classes have many methods that compute nothing."""


class _Watched(Mixin):
    """The base of the dynamic subclasses, which makes them copyable and picklable."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        make, args, *rest = reduced
        args = tuple([superclass_of(each, _Watched) if each is type(self) else each for each in args])
        return _remake, (make, *args), *rest


def watch_methods(model: nn.Module) -> None:
    """Cast ops in the public methods and properties of a model's own class."""
    if not isinstance(model, _Watched):
        watched = dict(_watched_names(type(model)))
        if watched:
            object.__setattr__(model, "__class__", subclass_with(_Watched, type(model), watched))


def unwatch_methods(model: nn.Module) -> None:
    """Restore the class of a model."""
    object.__setattr__(model, "__class__", superclass_of(type(model), _Watched))


def _remake(make: Callable[..., Any], *args: Any) -> Any:
    """Build a copy, or a model from a pickle."""
    model = make(*args)
    watch_methods(model)
    return model


def _watched_names(base: type) -> Iterator[tuple[str, Any]]:
    """Yield the name and the wrapper of each method and property of a class that is watched."""
    for name in dir(base):
        owner = next((cls for cls in base.__mro__ if name in vars(cls)), base)
        framework = owner.__module__.partition(".")[0] in _FRAMEWORKS
        if framework or name.startswith("_") or name == "forward" or hasattr(nn.Module, name):
            continue
        own = inspect.getattr_static(base, name)
        if isinstance(own, property) and own.fget is not None:
            yield name, property(_watched(own.fget), own.fset, own.fdel, own.__doc__)
        elif isinstance(own, functools.cached_property):
            yield name, functools.cached_property(_watched(own.func))
        # The code of a generator or a coroutine runs after the call has returned.
        elif isinstance(own, FunctionType) and not (
            inspect.isgeneratorfunction(own) or inspect.iscoroutinefunction(own)
        ):
            yield name, _watched(own)


def _watched(own: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method so that it runs under the casting that the first passes chose."""

    @functools.wraps(own)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not thread.open and not torch.compiler.is_compiling():
            for hook in forward_hooks(self).values():
                passes = getattr(hook, "passes", None)
                if isinstance(passes, FirstPasses):
                    return passes.run(own, self, args, kwargs)
        return own(self, *args, **kwargs)

    return watched
