"""A wrapper of an optimizer, which schedulers, ``isinstance`` and attribute access cannot tell from the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, NoReturn

import torch

from ..core.errors import UsageError

__all__ = ["ForwardingOptimizer", "forwarded"]


def forwarded(path: str, doc: str | None = None) -> Any:
    """Make a property that reads and sets a nested attribute by its path, such as ``optimizer.state``."""
    owner, _, name = path.rpartition(".")
    find: Callable[[Any], Any] = attrgetter(owner) if owner else lambda self: self
    return property(attrgetter(path), lambda self, value: setattr(find(self), name, value), doc=doc)


class ForwardingOptimizer(torch.optim.Optimizer):
    """An optimizer that forwards everything to ``self.optimizer``. Subclasses override some methods.

    Args:
        optimizer: the wrapped optimizer, whose groups and state are shared, not copied.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        # Do not call torch's constructor, which would create new groups and state.
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        if "optimizer" not in self.__dict__:  # partly constructed, for example by copy.copy
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    param_groups: list[dict[str, Any]] = forwarded("optimizer.param_groups")
    state: Any = forwarded("optimizer.state")
    defaults: dict[str, Any] = forwarded("optimizer.defaults")

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Run a step of the wrapped optimizer."""
        return self.optimizer.step(**kwargs) if closure is None else self.optimizer.step(closure, **kwargs)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad(*([] if set_to_none is None else [set_to_none]))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the wrapped optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict into the wrapped optimizer."""
        self.optimizer.load_state_dict(state_dict)

    def __getstate__(self) -> NoReturn:
        raise UsageError(
            f"{type(self).__name__} cannot be pickled or deep-copied: it is tied to the parameters of a living model. "
            "Save state_dict(), make a new one around the copy, and call load_state_dict()."
        )
