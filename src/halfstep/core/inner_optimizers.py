"""The parameters of optimizers, and the optimizers inside wrappers.

A wrapper is an optimizer that holds another optimizer and shares its ``param_groups``.
"""

from __future__ import annotations

from typing import Any

from ..torch_internals.subclasses import Mixin

__all__ = ["inner_optimizer", "package_of_step", "params_of", "state_holders", "unwrap"]

_DELEGATES = {"accelerate", "halfstep", "lightning", "lightning_fabric", "pytorch_lightning"}


def inner_optimizer(optimizer: Any) -> Any:
    """Return the optimizer that a wrapper holds; None if the argument is not a wrapper."""
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:
        return None
    here = getattr(optimizer, "__dict__", {})
    for value in here.values():
        if (
            value is not optimizer
            and getattr(value, "param_groups", None) is groups
            and ("param_groups" not in here or "param_groups" in vars(value))  # else the value is a wrapper of this one
        ):
            return value
    return None


def params_of(*optimizers: Any) -> list[Any]:
    """List the parameters of optimizers, in the order of the optimizers and their groups."""
    return [param for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]]


def unwrap(optimizer: Any) -> Any:
    """Unwrap ``LARC`` and the wrappers of Lightning, Fabric and Accelerate, which write no weights.

    The ``step`` of any other wrapper, such as Lookahead, may write to weights, so such a wrapper is returned unchanged.
    """
    chain: list[Any] = [optimizer]
    while package_of_step(chain[-1]) in _DELEGATES:  # asked first: a scaler asks this several times a step
        inner = inner_optimizer(chain[-1])
        if inner is None or any(inner is each for each in chain):
            break
        chain.append(inner)
    return chain[-1]


def package_of_step(optimizer: Any) -> str:
    """Name the package of the class that defines an optimizer's ``step``, such as "torch", ignoring mixins."""
    cls = next((cls for cls in type(optimizer).__mro__ if "step" in vars(cls) and cls.__mro__[-2] is not Mixin), object)
    return cls.__module__.partition(".")[0]


def state_holders(optimizer: Any) -> list[Any]:
    """List the optimizers in a chain of wrappers that own a ``state`` instead of passing on another's."""
    chain: list[Any] = []
    while optimizer is not None and not any(each is optimizer for each in chain):
        chain.append(optimizer)
        optimizer = inner_optimizer(optimizer)
    return [each for each in chain if "state" in vars(each)]
