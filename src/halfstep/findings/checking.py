"""``check``: the facts are gathered, with one read of the device, and every rule looks at them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from types import NoneType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..core.checks import check_count, check_kind
from ..core.dtypes import is_half
from ..core.inner_optimizers import bare
from ..core.policy import Policy
from ..gradients.loss_scaler import DeviceLossScaler
from ..stepping.attached import attached_to
from .facts import Facts
from .finding import Finding, Found, log
from .forward import run
from .rules_of_model import RULES as OF_MODEL
from .rules_of_optimizer import RULES as OF_OPTIMIZER

__all__ = ["RULES", "check", "finding", "findings_of", "log_findings", "log_first_step"]

RULES = {**OF_MODEL, **OF_OPTIMIZER}
"""All rules by their codes."""

_seen: WeakSet[Any] = WeakSet()  # optimizers whose first step has been looked at
_waiting: WeakKeyDictionary[nn.Module, set[int]] = WeakKeyDictionary()  # models without optimizers, with their weights

_ORDER = {"error": 0, "warning": 1, "note": 2}


def check(
    model: nn.Module,
    optimizer: Any = None,
    *,
    scaler: Any = None,
    policy: Policy | None = None,
    batch: Any = None,
    accumulate: int = 1,
) -> list[Finding]:
    """Look for what loses precision. An empty list is healthy.

    ::

        for finding in halfstep.check(model, optimizer, scaler=scaler, batch=lambda: loss_fn(model(x), y)):
            print(finding)

    Nothing changes: neither the model nor the optimizer nor the random state. The device is read once at most, and not
    at all without 16-bit weights and without gradients; again only where a sample of all gradients is 0. It says most
    after a few steps, before ``zero_grad``: then the optimizer has state, and the gradients are there.

    Args:
        model: any module, on any device, wrapped or not.
        optimizer: what trains it: any ``torch.optim.Optimizer``, a list of them, or None.
        scaler: the ``torch.amp.GradScaler`` or ``amp.GradScaler`` of its losses. That of ``amp.initialize`` is found.
        policy: the recipe, where the model does not show it.
        batch: for what only a forward pass shows (HS105, HS112 of outputs, parts of HS104): a function without
            arguments that returns the loss, or the arguments of the model: a tuple, a mapping or one tensor. It runs
            once without gradients, and random state and buffers are put back. All ranks must call it.
        accumulate: how many backward passes a step adds up.

    Returns:
        The findings, errors first, then by code.

    Raises:
        ArgumentTypeError: for an argument of the wrong kind.
        ArgumentValueError: for ``accumulate`` below 1.
    """
    check_kind("model", model, nn.Module, "a torch.nn.Module")
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [] if optimizer is None else [optimizer]
    for each in optimizers:
        check_kind("optimizer", bare(each), torch.optim.Optimizer, "a torch.optim.Optimizer")
    check_kind("scaler", scaler, (torch.amp.GradScaler, DeviceLossScaler, NoneType), "a torch or halfstep GradScaler")
    check_kind("policy", policy, (Policy, NoneType), "a halfstep.Policy")
    check_count("accumulate", accumulate)
    if batch is not None and not callable(batch):
        what = "a function that returns the loss, or the arguments of the model: a tuple, a mapping or one tensor"
        check_kind("batch", batch, (tuple, list, Mapping, torch.Tensor), what)
    forward = None if batch is None else run(model, batch)
    scalers = [] if scaler is None else [scaler]
    return findings_of(Facts(model, optimizers, scalers, policy=policy, accumulate=accumulate, forward=forward))


def log_findings(
    models: Iterable[nn.Module],
    optimizers: Sequence[Any],
    policy: Policy | None = None,
    *,
    scaling_is_known: bool = True,
) -> None:
    """Log what ``check`` finds of models that were just brought to a policy, in one line for each; none if all is well.

    A device without units (HS111) has a warning of its own, where it matters.

    Args:
        models: the models. Each is looked at with the optimizers that train something of it.
        optimizers: all optimizers. If there are none, the first step of any that is not prepared is looked at.
        policy: that of the models.
        scaling_is_known: whether the losses have no other scalers than those of ``amp.initialize``.
    """
    if not optimizers:  # one may have been forgotten
        _hear_of_steps()
        _waiting.update({model: set(map(id, model.parameters())) for model in models})
    for model in models:
        own = set(map(id, model.parameters()))
        trains = [one for one in optimizers if any(id(p) in own for g in one.param_groups for p in g["params"])]
        if trains:
            found = findings_of(Facts(model, trains, policy=policy, scaling_is_known=scaling_is_known))
            log(finding for finding in found if finding.code != "HS111")


@cache
def _hear_of_steps() -> None:
    register_optimizer_step_post_hook(_look_for_forgotten)


def _look_for_forgotten(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Log what an optimizer loses that has stepped a model in ``_waiting``. A look costs one id for each group."""
    firsts = {id(p) for group in optimizer.param_groups for p in group["params"][:1]} if _waiting else ()
    for model in [model for model, own in _waiting.items() if not own.isdisjoint(firsts)]:
        del _waiting[model]
        log_first_step(optimizer)


def log_first_step(optimizer: Any) -> None:
    """After the first step of an optimizer, log what it loses if its weights are 16-bit and it was never prepared."""
    if optimizer not in _seen:
        _seen.add(optimizer)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        if any(map(is_half, params)) and attached_to(optimizer) is None:
            log_findings([nn.ParameterList(params)], [optimizer], scaling_is_known=False)


def finding(code: str, found: Found) -> Finding:
    """What a rule has found, with its code and what to do."""
    return Finding(code, *found[:4], found.fix or RULES[code][1])


def findings_of(facts: Facts) -> list[Finding]:
    """The findings of all rules, errors first, then by code."""
    found = [finding(code, each) for code, (look, _) in RULES.items() for each in look(facts)]
    return sorted(found, key=lambda each: (_ORDER[each.severity], each.code))
