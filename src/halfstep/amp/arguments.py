"""The arguments that ``amp.initialize`` and ``amp.decorate`` share: models and optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

import torch
from torch import nn

from ..casting.modules import PARALLEL
from ..core.errors import ArgumentTypeError, UsageError
from ..core.hardware import warn_if_slow
from ..core.inner_optimizers import inner_optimizer
from ..optimizers.larc import LARC

__all__ = [
    "Models",
    "Optimizers",
    "as_models",
    "as_optimizers",
    "device_of",
    "returned",
    "typed",
    "warn_of_slow_devices",
]

# A list has to be a list. Its items are checked when the function is called: list[Linear] is no list[Module].
Models = TypeVar("Models", bound=nn.Module | list[Any])
Optimizers = TypeVar("Optimizers", bound=torch.optim.Optimizer | LARC | list[Any])
_Others = ParamSpec("_Others")


class _Typed(Protocol[_Others]):
    """A function that returns what it is given: models, or models and optimizers."""

    @overload
    def __call__(
        self, models: Models, optimizers: None = None, *args: _Others.args, **kwargs: _Others.kwargs
    ) -> Models: ...

    @overload
    def __call__(
        self, models: Models, optimizers: Optimizers, *args: _Others.args, **kwargs: _Others.kwargs
    ) -> tuple[Models, Optimizers]: ...


def typed(function: Callable[Concatenate[Any, Any, _Others], Any]) -> _Typed[_Others]:
    """The function, of which a type checker knows that what is given comes back."""
    return function  # type: ignore[return-value]


def as_models(caller: str, models: Any) -> list[nn.Module]:
    """The list of models that an argument holds, which is one model or a list.

    Raises:
        ArgumentTypeError: for anything else.
        UsageError: for a model that is wrapped for parallel training.
    """
    found = _listed("model", models, nn.Module)
    if not found:
        raise ArgumentTypeError(f"The list of models is empty; give {caller} the models that the optimizers train.")
    for model in found:
        if isinstance(model, PARALLEL):
            kind = type(model).__name__
            raise UsageError(
                f"{kind} is around the bare model already and has to come after: first call {caller}() on the original "
                f"model, and then wrap what it returns in {kind}."
            )
    return found


def as_optimizers(caller: str, optimizers: Any, *, wrapped: bool = False) -> list[Any]:
    """The list of optimizers that an argument holds: None, one or a list; ``wrapped`` also allows wrappers of them.

    Raises:
        ArgumentTypeError: for anything else.
        UsageError: for an ``FP16_Optimizer``.
    """
    given = optimizers if isinstance(optimizers, list) else [optimizers]
    if any(type(optimizer).__name__ == "FP16_Optimizer" for optimizer in given):
        raise UsageError(f"An FP16_Optimizer has its own masters and loss scale; give {caller} the bare optimizer.")
    if optimizers is None:
        return []
    inner = [(wrapped and inner_optimizer(each)) or each for each in given]
    _listed("optimizer", inner if given is optimizers else inner[0], torch.optim.Optimizer)
    return given


def _listed(name: str, given: Any, *kinds: type) -> list[Any]:
    found = given if isinstance(given, list) else [given]
    for item in found:
        if not isinstance(item, kinds):
            inside = "" if item is given else f" with an item of type {type(item).__name__}"
            raise ArgumentTypeError(
                f"{name}s must be either a single {name} or a list of {name}s (torch.{_PLACES[name]}), not "
                f"{type(given).__name__}{inside}."
            )
    return found


_PLACES = {"model": "nn.Module", "optimizer": "optim.Optimizer"}


def returned(models: Any, optimizers: Any) -> Any:
    """The result of ``initialize`` and ``decorate``: their arguments, in the same shape."""
    return models if optimizers is None else (models, optimizers)


def device_of(models: list[nn.Module]) -> torch.device:
    """The device of the first parameter; the CPU where there is none."""
    return next((param.device for model in models for param in model.parameters()), torch.device("cpu"))


def warn_of_slow_devices(models: list[nn.Module], half: torch.dtype) -> None:
    """Warn, once for each device of the models, where it has no units for a 16-bit dtype."""
    for device in {param.device for model in models for param in model.parameters()}:
        warn_if_slow(device, half)
