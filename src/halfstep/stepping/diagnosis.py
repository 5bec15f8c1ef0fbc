"""Find out what is wrong with gradients, for the message of an error. Slow, and called only then."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ..core.dtypes import dtype_name, is_half
from ..core.text import counted
from ..core.torch_compat import values_of
from ..gradients.held_masters import master_of

__all__ = ["first_bad_gradient"]


def first_bad_gradient(optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """The first parameter whose gradient holds inf or NaN, by its qualified name where one is known. Reads the device.

    Args:
        optimizers: whose parameters to look at, in their order; before them those of their models, where they are
            attached, in the order of ``named_parameters``.

    Returns:
        For example ``layers.0.weight (4x3, float16: 2 inf, 0 NaN among 12 values)``. If an optimizer updates 16-bit
        weights without masters, a sentence on that follows, because their steps may have made the weights inf or NaN.
    """
    seen: set[int] = set()
    for name, param in _named(optimizers):
        grad = param.grad
        if grad is None or id(param) in seen:
            continue
        seen.add(id(param))
        values = values_of(grad) if grad.is_sparse else grad
        infs, nans = int(values.isinf().sum()), int(values.isnan().sum())
        if infs or nans:
            shape = "x".join(map(str, param.shape)) or "scalar"
            counts = f"{infs} inf, {nans} NaN among {values.numel()} values"
            return f"{name} ({shape}, {dtype_name(grad.dtype)}: {counts}){_on_masters(optimizers)}"
    return "none is left to look at; they were cleared or replaced before the loss scale was updated"


def _on_masters(optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """A sentence on the first optimizer that updates 16-bit weights without masters; nothing if there is none."""
    for optimizer in optimizers:
        if getattr(getattr(optimizer, "options", None), "master_weights", None):
            continue
        params = [p for group in optimizer.param_groups for p in group["params"]]
        half = [p for p in params if is_half(p) and p.requires_grad and master_of(p) is None]
        if half:
            return (
                f". {len(half)} of {counted(len(params), 'parameter')} of {type(optimizer).__name__} are "
                f"{dtype_name(half[0].dtype)} and have no fp32 masters: small updates are lost (HS101), large ones "
                "overflow, and an eps that is 0 in this dtype divides by 0 (HS106). Give the model fp32 weights "
                'before (model.float()), or use opt_level="O2", which keeps masters'
            )
    return ""


def _named(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[tuple[str, torch.Tensor]]:
    for optimizer in optimizers:
        attached = getattr(optimizer, "_amp_stash", None)
        for ref in () if attached is None else attached.window.replaced.models:
            if (model := ref()) is not None:
                yield from model.named_parameters()
    for optimizer in optimizers:
        for g, group in enumerate(optimizer.param_groups):
            names = group.get("param_names")
            for i, param in enumerate(group["params"]):
                yield names[i] if names else f"parameter {i} of group {g} of {type(optimizer).__name__}", param
