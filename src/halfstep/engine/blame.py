"""Which gradient is not finite, in words, for the message of an error. Reads the device; slow, and rarely called."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from ..core.formats import dtype_name

__all__ = ["first_bad_gradient"]


def first_bad_gradient(optimizers: Iterable[torch.optim.Optimizer], models: Iterable[nn.Module] = ()) -> str:
    """The first parameter whose gradient holds inf or NaN, by its qualified name where one is known.

    Args:
        optimizers: whose parameters to look at, in their order.
        models: looked at before, in the order of ``named_parameters``; they know the names.

    Returns:
        For example ``layers.0.weight (4x3, float16: 2 inf, 0 NaN among 12 values)``.
    """
    seen: set[int] = set()
    for name, param in _named(optimizers, models):
        grad = param.grad
        if grad is None or id(param) in seen:
            continue
        seen.add(id(param))
        values = grad._values() if grad.is_sparse else grad
        infs, nans = int(values.isinf().sum()), int(values.isnan().sum())
        if infs or nans:
            shape = "x".join(map(str, param.shape)) or "scalar"
            return f"{name} ({shape}, {dtype_name(grad.dtype)}: {infs} inf, {nans} NaN among {values.numel()} values)"
    return "none is left to look at; they were cleared or replaced before the loss scale was updated"


def _named(
    optimizers: Iterable[torch.optim.Optimizer], models: Iterable[nn.Module]
) -> Iterator[tuple[str, torch.Tensor]]:
    for model in models:
        yield from model.named_parameters()
    for optimizer in optimizers:
        for g, group in enumerate(optimizer.param_groups):
            names = group.get("param_names")
            for i, param in enumerate(group["params"]):
                yield names[i] if names else f"parameter {i} of group {g} of {type(optimizer).__name__}", param
