"""``amp.decorate``: Paddle's way to 16-bit weights, for training under ``amp.auto_cast(level="O2")``."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.instancenorm import _InstanceNorm

from ..core.errors import ArgumentTypeError, ArgumentValueError, UsageError
from ..core.formats import HALF_DTYPES, default_half, dtype_name, parse_dtype
from ..core.hardware import warn_if_slow
from ..engine.casting import modules
from ..engine.stepping import bind, binding_of

__all__ = ["decorate"]

_SAVE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def decorate(
    models: Any,
    optimizers: Any = None,
    level: str = "O1",
    dtype: torch.dtype | str | None = None,
    master_weight: bool | None = None,
    save_dtype: torch.dtype | str | None = None,
    master_grad: bool = False,
    excluded_layers: Any = None,
    *,
    module_filter: modules.ModuleFilter | None = None,
) -> Any:
    """Cast models to 16-bit weights and give optimizers fp32 masters; call it before any parallel wrapper.

    ::

        model, optimizer = amp.decorate(model, optimizer, level="O2")
        with amp.auto_cast(level="O2"):
            loss = loss_fn(model(x), y)

    Parameters of BatchNorm, LayerNorm and InstanceNorm and of the excluded layers stay fp32.

    Args:
        models: a module or a list of modules; changed in place.
        optimizers: a ``torch.optim.Optimizer``, a list of them, or None; changed in place.
        level: "O2" casts; "O1" returns everything as it is, for its casts happen in ``auto_cast``.
        dtype: torch.float16, torch.bfloat16 or their names; None means float16 for a model on CUDA and bfloat16
            elsewhere.
        master_weight: whether the optimizers update fp32 masters; None means yes.
        save_dtype: the dtype of floating entries in ``state_dict()``. None means fp32 if there are masters, which
            are saved then and lose nothing, and the dtype of the parameters otherwise.
        master_grad: let autograd accumulate gradients of the 16-bit parameters in fp32.
        excluded_layers: modules, module types, or a list of both, whose parameters stay fp32; a module given as an
            instance keeps those of its submodules too.
        module_filter: called as ``module_filter(module, qualified_name)``; a dtype it returns is that module's own,
            with casts at its borders, and None leaves it to the other arguments.

    Returns:
        What was given, in the same shape: ``models`` alone if ``optimizers`` is None, else ``(models, optimizers)``.

    Raises:
        ArgumentTypeError: models, optimizers or excluded layers of the wrong kind.
        ArgumentValueError: a level or dtype that is not allowed.
        UsageError: a model wrapped for parallel training already, an optimizer that was decorated before, or
            ``master_grad`` on a torch without ``Tensor.grad_dtype``. Nothing has been changed then.

    Warns:
        PrecisionWarning: once, where the device of a model has no units for the dtype.

    Source: Paddle's AMP guide, section 2.1.3.
    """
    if level not in ("O1", "O2"):
        raise ArgumentValueError(
            f"level={level!r} should be O1 or O2: O1 casts inside amp.auto_cast only, O2 casts the model."
        )
    model_list = _listed(models, nn.Module, "models must be either a single model or a list of models")
    optimizer_list = (
        []
        if optimizers is None
        else _listed(
            optimizers, torch.optim.Optimizer, "optimizers must be either a single optimizer or a list of them"
        )
    )
    half = _check_half(dtype, model_list)
    saved = None if save_dtype is None else _check_save_dtype(save_dtype)
    keep = _excluded(excluded_layers)
    _check_untouched(model_list, optimizer_list, master_grad)
    if level == "O1":
        return models if optimizers is None else (models, optimizers)
    for device in {param.device for model in model_list for param in model.parameters()}:
        warn_if_slow(device, half)

    masters = master_weight is not False and bool(optimizer_list)
    for model in model_list:
        modules.cast_module(model, half, keep=keep, module_filter=module_filter)
        modules.attach(model, saved=saved or (torch.float32 if masters else None))
        if master_grad:
            for param in model.parameters():
                if param.dtype in HALF_DTYPES:
                    param.grad_dtype = torch.float32
    for optimizer in optimizer_list:
        bind(optimizer, master_weights=masters).models = tuple(map(weakref.ref, model_list))
    return models if optimizers is None else (models, optimizers)


def _listed(given: Any, kind: type, rule: str) -> list[Any]:
    found = given if isinstance(given, list) else [given]
    for item in found:
        if not isinstance(item, kind):
            raise ArgumentTypeError(f"{rule}, not {type(given).__name__} with a {type(item).__name__}.")
    return found


def _check_half(dtype: torch.dtype | str | None, models: list[nn.Module]) -> torch.dtype:
    if dtype is None:
        first = next((p for model in models for p in model.parameters()), None)
        return default_half(first.device if first is not None else "cpu")
    half = parse_dtype(dtype)
    if half not in HALF_DTYPES:
        raise ArgumentValueError(f"dtype={dtype_name(half)}, but decorate only supports float16 or bfloat16.")
    return half


def _check_save_dtype(save_dtype: torch.dtype | str) -> torch.dtype:
    saved = parse_dtype(save_dtype)
    if saved not in _SAVE_DTYPES:
        allowed = ", ".join(dtype_name(d) for d in _SAVE_DTYPES)
        raise ArgumentValueError(f"save_dtype={save_dtype!r}, but it can only be {allowed}.")
    return saved


def _excluded(layers: Any) -> Callable[[nn.Module], bool]:
    items = layers if isinstance(layers, (list, tuple, set)) else [] if layers is None else [layers]
    types: list[type] = [modules.BatchNorm, nn.LayerNorm, _InstanceNorm]
    kept: set[int] = set()
    for item in items:
        if isinstance(item, nn.Module):
            kept.update(id(module) for module in item.modules())
        elif isinstance(item, type) and issubclass(item, nn.Module):
            types.append(item)
        else:
            raise ArgumentTypeError(
                f"excluded_layers must be a module, a module type, or a list of them; {item!r} is neither."
            )
    return lambda module: isinstance(module, tuple(types)) or id(module) in kept


def _check_untouched(models: list[nn.Module], optimizers: list[torch.optim.Optimizer], master_grad: bool) -> None:
    for model in models:
        if isinstance(model, modules.PARALLEL):
            raise UsageError(
                "For distributed AMP training, first call amp.decorate() on the original model, and then wrap what it "
                f"returns in {type(model).__name__}."
            )
    for optimizer in optimizers:
        if binding_of(optimizer) is not None:
            raise UsageError(f"This {type(optimizer).__name__} was decorated or initialized before; make a new one.")
    if master_grad and not hasattr(torch.Tensor, "grad_dtype"):
        raise UsageError(
            f"master_grad=True needs Tensor.grad_dtype, which torch {torch.__version__} has not; leave it out."
        )
