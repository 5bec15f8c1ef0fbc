"""An optimizer that stands in front of another one: schedulers, ``isinstance`` and attribute access cannot tell."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, NoReturn

import torch

from ..core.errors import UsageError

__all__ = ["ForwardingOptimizer", "forwarded"]


def forwarded(path: str, doc: str | None = None) -> Any:
    """A property that is an attribute of an attribute, by a path such as ``optimizer.state``."""
    owner, _, name = path.rpartition(".")
    find: Callable[[Any], Any] = attrgetter(owner) if owner else lambda self: self
    return property(attrgetter(path), lambda self, value: setattr(find(self), name, value), doc=doc)


class ForwardingOptimizer(torch.optim.Optimizer):
    """Everything an optimizer has, taken from ``self.optimizer``; subclasses change what they are there for.

    Args:
        optimizer: the one in the back; its groups and state are shared, not copied.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        # Not torch's constructor: it would make groups and state of its own.
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        if "optimizer" not in self.__dict__:  # half made, for example by copy.copy
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    param_groups: list[dict[str, Any]] = forwarded("optimizer.param_groups")
    state: Any = forwarded("optimizer.state")
    defaults: dict[str, Any] = forwarded("optimizer.defaults")

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """One step of the optimizer in the back."""
        return self.optimizer.step(**kwargs) if closure is None else self.optimizer.step(closure, **kwargs)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad(*([] if set_to_none is None else [set_to_none]))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the optimizer in the back."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """What the optimizer in the back saves."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned."""
        self.optimizer.load_state_dict(state_dict)

    def __getstate__(self) -> NoReturn:
        raise UsageError(
            f"{type(self).__name__} cannot be pickled or deep-copied: it is tied to the parameters of a living model. "
            "Save state_dict(), make a new one around the copy, and call load_state_dict()."
        )
