"""Checks of the arguments that ``amp.initialize`` and ``amp.decorate`` share."""

from __future__ import annotations

from collections.abc import Callable, Collection
from difflib import get_close_matches
from types import NoneType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

import torch
from torch import nn

from ..casting.modules import PARALLEL
from ..core.checks import check_kind
from ..core.dtypes import parse_dtype
from ..core.errors import ArgumentTypeError, ArgumentValueError, UsageError
from ..core.hardware import warn_if_slow
from ..core.inner_optimizers import inner_optimizer
from ..optimizers.larc import LARC

__all__ = [
    "Layers",
    "Models",
    "ModuleFilter",
    "Optimizers",
    "RecipeChoice",
    "as_models",
    "as_optimizers",
    "chosen_dtypes",
    "device_of",
    "returned",
    "typed",
    "warn_of_slow_devices",
]

if TYPE_CHECKING:
    from ..formats.recipe import RecipeChoice
else:
    RecipeChoice = Any  # the formats room is imported on first use

ModuleFilter = Callable[[nn.Module, str], "torch.dtype | str | None"]
_Layer = str | nn.Module | type[nn.Module] | Callable[[nn.Module, str], bool]
Layers = _Layer | Collection[_Layer] | None
"""The values that ``excluded_layers`` takes."""

# The items of a list are checked at run time only, because list[Linear] is not a list[Module] for a type checker.
Models = TypeVar("Models", bound=nn.Module | list[Any])
Optimizers = TypeVar("Optimizers", bound=torch.optim.Optimizer | LARC | list[Any])
_Others = ParamSpec("_Others")


class _Typed(Protocol[_Others]):
    """The type of a function that returns its arguments: models, or models and optimizers."""

    @overload
    def __call__(
        self, models: Models, optimizers: None = None, *args: _Others.args, **kwargs: _Others.kwargs
    ) -> Models: ...

    @overload
    def __call__(
        self, models: Models, optimizers: Optimizers, *args: _Others.args, **kwargs: _Others.kwargs
    ) -> tuple[Models, Optimizers]: ...


def typed(function: Callable[Concatenate[Any, Any, _Others], Any]) -> _Typed[_Others]:
    """Tell type checkers that a function returns its models and optimizers with unchanged types."""
    return function  # type: ignore[return-value]


def as_models(caller: str, models: Any) -> list[nn.Module]:
    """Return a model or a list of models as a list.

    Raises:
        ArgumentTypeError: for any other value.
        UsageError: for a model in a wrapper for parallel training.
    """
    found = _listed("model", models, nn.Module)
    if not found:
        raise ArgumentTypeError(f"The list of models is empty; give {caller} the models that the optimizers train.")
    for model in found:
        if isinstance(model, PARALLEL):
            kind = type(model).__name__
            raise UsageError(
                f"The model is already wrapped in {kind}, which must come after {caller}(): call it on the original "
                f"model, then wrap the model that it returns in {kind}."
            )
    return found


def as_optimizers(caller: str, optimizers: Any, *, wrapped: bool = False) -> list[Any]:
    """Return None, an optimizer or a list of optimizers as a list; ``wrapped`` also allows wrappers of optimizers.

    Raises:
        ArgumentTypeError: for any other value.
        UsageError: for an ``FP16_Optimizer``.
    """
    given = optimizers if isinstance(optimizers, list) else [] if optimizers is None else [optimizers]
    if any(type(optimizer).__name__ == "FP16_Optimizer" for optimizer in given):
        raise UsageError(f"An FP16_Optimizer has its own masters and loss scale; give {caller} the bare optimizer.")
    inner = [(wrapped and inner_optimizer(each)) or each for each in given]
    _listed("optimizer", inner if given is optimizers or not given else inner[0], torch.optim.Optimizer)
    return given


def chosen_dtypes(models: list[nn.Module], excluded: Any, module_filter: Any) -> dict[nn.Module, torch.dtype]:
    """Return the dtypes that ``excluded_layers`` and ``module_filter`` choose, each module before its submodules.

    Raises:
        ArgumentTypeError: for an item that does not describe layers, or a filter that is not callable.
        ArgumentValueError: for a name, type or module that no model has, or a value that is not a dtype.
    """
    what = "a function that is called with (module, name) and returns a dtype, or None to leave a module to the level"
    check_kind("module_filter", module_filter, (Callable, NoneType), what)  # type: ignore[arg-type]
    items = excluded if isinstance(excluded, (list, tuple, set, frozenset)) else [excluded][: excluded is not None]
    named = [(module, name) for model in models for name, module in model.named_modules()]
    names = [name for _, name in named]
    for item in items:
        if not (issubclass(item, nn.Module) if isinstance(item, type) else callable(item) or isinstance(item, str)):
            raise ArgumentTypeError(
                "excluded_layers must be a module, its name, a module type, a function of (module, name), or a list of "
                f"them; {item!r} is none of these."
            )
        if isinstance(item, (str, type, nn.Module)) and not any(_answer(item, *each) for each in named):
            given = repr(item) if isinstance(item, str) else getattr(item, "__name__", f"this {type(item).__name__}")
            near = get_close_matches(given, names) or names[:4]
            raise ArgumentValueError(
                f"excluded_layers: {given} matches no module of the model{'s' * (len(models) > 1)}. Leave it out, or "
                f"give a function of (module, name), which may match none. Names are {', '.join(map(repr, near))}."
            )
    answers = [(each[0], _answer(item, *each)) for each in named for item in (*items, module_filter)]
    found = ((module, answer) for module, answer in answers if answer not in (None, False))
    return {module: torch.float32 if answer is True else parse_dtype(answer) for module, answer in found}


def _answer(item: Any, module: nn.Module, name: str) -> Any:
    """Return True or a dtype if an item of ``excluded_layers`` or a ``module_filter`` chooses a module."""
    if item is None or isinstance(item, (str, nn.Module)):
        return item is module or item == name
    return isinstance(module, item) if isinstance(item, type) else item(module, name)


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
    """Return the result of ``initialize`` and ``decorate``: their arguments, in the same structure."""
    return models if optimizers is None else (models, optimizers)


def device_of(models: list[nn.Module]) -> torch.device:
    """Return the device of the first parameter; the CPU if there are no parameters."""
    return next((param.device for model in models for param in model.parameters()), torch.device("cpu"))


def warn_of_slow_devices(models: list[nn.Module], half: torch.dtype) -> None:
    """Warn once for each device of the models that has no units for a 16-bit dtype."""
    for device in {param.device for model in models for param in model.parameters()}:
        warn_if_slow(device, half)
