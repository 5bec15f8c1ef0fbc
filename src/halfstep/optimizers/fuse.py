"""``fuse``: the optimizer of an existing script, made a fused one where it stands."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..core.errors import ArgumentTypeError, ArgumentValueError
from ..engine.stepping import binding_of
from ._base import FusedOptimizer
from ._options import MasterForm, Options
from .adagrad import FusedAdagrad
from .adam import FusedAdam
from .sgd import FusedSGD

__all__ = ["fuse"]

_TWINS: dict[type[torch.optim.Optimizer], tuple[type[FusedOptimizer], dict[str, Any]]] = {
    torch.optim.AdamW: (FusedAdam, {"adam_w_mode": True, "bias_correction": True}),
    torch.optim.Adam: (FusedAdam, {"adam_w_mode": False, "bias_correction": True}),
    torch.optim.SGD: (FusedSGD, {"wd_after_momentum": False}),
    torch.optim.Adagrad: (FusedAdagrad, {"adagrad_w_mode": False}),
}


def fuse(
    optimizer: torch.optim.Optimizer,
    *,
    master_weights: MasterForm = None,
    max_grad_norm: float | None = None,
    state_dtype: torch.dtype | None = None,
) -> torch.optim.Optimizer:
    """Turn a ``torch.optim.Adam``, ``AdamW``, ``SGD`` or ``Adagrad`` into the fused optimizer of that name, in place.

    ::

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
        optimizers.fuse(optimizer)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2")

    It stays the same object, with its groups, state and hooks, so schedulers made before go on driving it.

    Args:
        optimizer: of exactly one of these classes, not yet given to ``amp.initialize``.
        master_weights: see ``Options``.
        max_grad_norm: see ``Options``.
        state_dtype: see ``Options``.

    Returns:
        The optimizer.

    Raises:
        ArgumentTypeError: for an optimizer of another class.
        ArgumentValueError: for ``differentiable=True``, or an optimizer whose ``step`` was replaced, as ``amp`` does.
    """
    twin = _TWINS.get(type(optimizer))
    if twin is None:
        names = ", ".join(f"torch.optim.{cls.__name__}" for cls in _TWINS)
        raise ArgumentTypeError(f"fuse takes {names}, not {type(optimizer).__name__}.")
    if binding_of(optimizer) is not None:
        raise ArgumentValueError("fuse comes before amp.initialize or amp.decorate, not after.")
    scheduled = vars(optimizer).get("step")
    if scheduled is not None and not hasattr(scheduled, "_wrapped_by_lr_sched"):
        raise ArgumentValueError(
            f"fuse: the step of this {type(optimizer).__name__} has been replaced; fuse it before."
        )
    cls, names_of_ours = twin
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            raise ArgumentValueError("fuse: differentiable=True needs a step that autograd can follow; leave it out.")
    own = dict(names_of_ours)
    if type(optimizer) is torch.optim.Adam and optimizer.defaults.get("decoupled_weight_decay"):
        own["adam_w_mode"] = True
    if scheduled is not None:
        del optimizer.step
    options = Options(max_grad_norm, master_weights, state_dtype)
    fused: Any = optimizer
    fused.__class__ = cls
    fused.options, fused.set_grad_none, fused.grad_norm = options, True, None
    fused._groups, fused._warned = {}, False
    for entry in (fused.defaults, *fused.param_groups):
        entry.update(own)
        for name in ("foreach", "fused"):
            entry.pop(name, None)
    if scheduled is not None:
        fused.step = _seen_by_schedulers(fused)
    if isinstance(fused, FusedSGD):
        fused.materialize_master_grads = True
        fused.count_loaded_steps()
    return optimizer


def _seen_by_schedulers(optimizer: Any) -> Any:
    """The optimizer's own step with the mark that torch's schedulers put on it, to warn of a wrong order of calls."""
    own = type(optimizer).step

    @functools.wraps(own)
    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True
        return own(optimizer, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return step
