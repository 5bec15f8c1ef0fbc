"""Find out what is wrong with gradients, for the message of an error. Slow, and called only then."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from ..core.dtypes import dtype_name, is_half
from ..core.errors import UsageError
from ..core.text import counted
from ..core.torch_compat import values_of
from ..gradients.master_registry import master_of
from ..kernels.shards import is_sharded

__all__ = ["first_bad_gradient", "refuse_strays"]


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


def refuse_strays(params: Sequence[torch.Tensor], models: Iterable[weakref.ref[nn.Module]], name: str) -> None:
    """Refuse an optimizer without gradients whose parameters are not those of its models (any more).

    Args:
        params: those of the optimizer.
        models: which it trains.
        name: of its class.

    Raises:
        UsageError: if none of the parameters is in the models.
    """
    known = {id(param) for ref in models if (model := ref()) is not None for param in model.parameters()}
    if known and params and known.isdisjoint(map(id, params)):
        present = [param for ref in models if (model := ref()) is not None for param in model.parameters()]
        raise UsageError(
            f"No gradient came to the parameters of this {name}, and none of them is in its model any more: "
            f"{_replaced(params, present)}"
        )


def _replaced(params: Sequence[torch.Tensor], present: Sequence[torch.Tensor]) -> str:
    """What has put other parameters in the place of an optimizer's, as far as they show it, and what to do."""
    if any(map(is_sharded, present)):
        return (
            "they were sharded after amp.initialize or amp.decorate, as fully_shard does it. Shard the model first, "
            "make the optimizer from its new parameters, and initialize then (O1, or MixedPrecisionPolicy of "
            "fully_shard)."
        )
    if any(param.is_meta for param in params):
        return (
            "the optimizer has those on the meta device, and model.to_empty() or load_state_dict(assign=True) made "
            "others after amp.initialize or amp.decorate. First to_empty() and load the weights, then make the "
            "optimizer from the new parameters, and initialize then."
        )
    return (
        "others were put in their place after amp.initialize or amp.decorate. load_state_dict(assign=True) does so: "
        "leave out assign=True, and the weights are loaded into the parameters and masters that are there. So does "
        "an assignment like module.weight = nn.Parameter(...): do it before, and make the optimizer after it."
    )


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
        for ref in () if attached is None else attached.passes.models:
            if (model := ref()) is not None:
                yield from model.named_parameters()
    for optimizer in optimizers:
        for g, group in enumerate(optimizer.param_groups):
            names = group.get("param_names")
            for i, param in enumerate(group["params"]):
                yield names[i] if names else f"parameter {i} of group {g} of {type(optimizer).__name__}", param
