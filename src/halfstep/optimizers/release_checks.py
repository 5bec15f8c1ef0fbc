"""The cases that gradient release refuses, with errors that say what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..core.errors import ArgumentValueError, UsageError
from ..core.inner_optimizers import params_of
from ..parameters.table import reduced_params

__all__ = ["check", "refuse_closure", "refuse_gradient", "refuse_ranks", "refuse_second"]


def check(optimizer: Any, model: nn.Module, is_released: Callable[[torch.Tensor], bool]) -> None:
    """Refuse an optimizer and a model whose gradients cannot be released.

    Args:
        optimizer: a fused optimizer.
        model: the model whose backward passes will step the parameters.
        is_released: returns True if another optimizer releases the gradient of a parameter.

    Raises:
        ArgumentValueError: for parameters that are not in the model or on several devices, and for sparse layers.
        UsageError: for an optimizer that clips, for parameters of two optimizers, for masters outside the optimizer,
            and for more than one rank.
    """
    own = [group.get("max_grad_norm") or None for group in optimizer.param_groups]  # optimizers of 2018 have it there
    if limits := [limit for limit in (optimizer.options.max_grad_norm, *own) if limit is not None]:
        kind = type(optimizer).__name__
        raise UsageError(
            f"attach(model): this {kind} clips with max_grad_norm={limits[0]}, which needs the norm of all gradients, "
            "and gradient release frees each gradient as it arrives. Create the optimizer with max_grad_norm=None "
            "(FusedLAMB clips by default), or do not attach it."
        )
    groups = enumerate(optimizer.param_groups)
    names = {id(p): f"parameter {i} of group {g}" for g, group in groups for i, p in enumerate(group["params"])}
    params = params_of(optimizer)
    known = {id(p) for p in model.parameters()}
    for param in params:
        name = f"attach(model): {names[id(param)]}, of shape {tuple(param.shape)},"
        if id(param) not in known:
            raise ArgumentValueError(
                f"{name} is not in the model. Pass a model that has all parameters of this optimizer; "
                "torch.nn.ModuleList combines several."
            )
        if is_released(param):
            raise UsageError(f"{name} is already released by another optimizer; only one can use its gradient.")
    if len(devices := sorted({str(p.device) for p in params})) > 1:
        raise ArgumentValueError(
            f"attach(model): parameters are on {', '.join(devices)}, whose backward passes run at the same time; "
            "create one optimizer per device."
        )
    for path, module in model.named_modules():
        if getattr(module, "sparse", False) is True and any(id(p) in names for p in module.parameters(recurse=False)):
            raise ArgumentValueError(
                f"attach(model): {path or 'the model'} ({type(module).__name__}) has sparse gradients, which fused "
                "optimizers do not support; create it with sparse=False."
            )
        refuse_ranks(params, first_fsdp=type(module).__name__ == "FullyShardedDataParallel")
    attached = getattr(optimizer, "_amp_stash", None)
    if attached is not None and attached.window.plain is not None:
        raise UsageError(
            f"attach(model): the masters of this {type(optimizer).__name__} are kept outside it, because it shares "
            "a parameter with another optimizer or because torch is older than 2.13. Gradient release needs them in "
            "the state of the optimizer."
        )


def refuse_ranks(params: list[torch.Tensor], *, first_fsdp: bool = False) -> None:
    """Refuse gradients that are averaged over ranks.

    Raises:
        UsageError: if a parameter is sharded or in a DistributedDataParallel wrapper, or with ``first_fsdp``.
    """
    if first_fsdp or reduced_params(params):
        raise UsageError(
            "Gradient release steps a parameter as soon as its gradient arrives, before DistributedDataParallel or "
            "FSDP averages it over ranks. Train in one process, or do not attach."
        )


def refuse_closure(closure: Any) -> None:
    """Refuse a closure.

    Raises:
        UsageError: if ``closure`` is not None.
    """
    if closure is not None:
        raise UsageError(
            "step(closure) runs backward passes itself, and gradient release would already step in them. Call "
            "backward() and then step() without a closure, or end the release with remove()."
        )


def refuse_gradient(param: torch.Tensor) -> None:
    """Refuse a gradient that is part of a graph.

    Raises:
        UsageError: if it requires grad.
    """
    if param.grad is not None and param.grad.requires_grad:
        raise UsageError(
            "backward(create_graph=True) needs the gradients and weights again, and gradient release frees the "
            "gradients and changes the weights. Use torch.autograd.grad instead, or end the release with remove()."
        )


def refuse_second(param: torch.Tensor) -> None:
    """Refuse the second gradient of a parameter in one step.

    Raises:
        UsageError: always.
    """
    raise UsageError(
        f"A second gradient came to a parameter of shape {tuple(param.shape)} before optimizer.step(), and with "
        "gradient release each step has one backward pass. Call step() after each pass; to accumulate, end the release "
        "with remove(). After a pass that failed, and over gradients from before attach(), call optimizer.zero_grad(). "
        "A parameter in two checkpoints with use_reentrant=True gets two gradients in one pass: use False."
    )
