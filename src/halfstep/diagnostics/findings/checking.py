"""``check``: gathers the facts with one read of the device, and applies every rule to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from types import NoneType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ...core.checks import check_count, check_kind
from ...core.dtypes import is_half
from ...core.inner_optimizers import params_of, unwrap
from ...core.policy import Policy
from ...formats.findings import RULES as OF_FORMATS
from ...parameters.loss_scaler import DeviceLossScaler
from ...stepping.attached import attached_to
from .facts import Facts, Rules
from .finding import Finding, Found, log
from .forward import Forward, run
from .rules_of_model import RULES as OF_MODEL
from .rules_of_optimizer import RULES as OF_OPTIMIZER

__all__ = ["RULES", "check", "finding", "findings_of", "log_findings", "log_first_step"]

RULES: Rules = {**OF_MODEL, **OF_OPTIMIZER, **OF_FORMATS}
"""All rules by code."""

_seen: WeakSet[Any] = WeakSet()  # optimizers whose first step was checked
_waiting: WeakKeyDictionary[nn.Module, set[int]] = WeakKeyDictionary()  # models without optimizers

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
    """Check a training for known causes of lost precision. An empty list means that none was found.

    ::

        for finding in halfstep.check(model, optimizer, scaler=scaler, batch=lambda: loss_fn(model(x), y)):
            print(finding)

    The model, the optimizer and the random state do not change. The device is read at most once, and not at all if
    there are neither 16-bit weights nor gradients; a second read happens only if a sample of all gradients is 0. The
    best time is after a few steps and before ``zero_grad``, when the optimizer has state and the parameters gradients.

    Args:
        model: any module, on any device, wrapped or not.
        optimizer: the optimizer: any ``torch.optim.Optimizer``, a list of them, or None.
        scaler: the ``torch.amp.GradScaler`` or ``amp.GradScaler`` of the losses. Loss scalers of ``amp.initialize`` are
            found without it.
        policy: the policy, if the model does not show it.
        batch: input for a forward pass, which HS105, HS112 of outputs, HS122 and parts of HS104 need: a function
            without arguments that returns the loss, or the arguments of the model (a tuple, a mapping or one tensor).
            The pass runs once without gradients, and random state and buffers are restored. All ranks must call it.
        accumulate: the number of backward passes per step.

    Returns:
        The findings, errors first, then by code.

    Raises:
        ArgumentTypeError: for an argument of the wrong type.
        ArgumentValueError: for ``accumulate`` below 1.
    """
    check_kind("model", model, nn.Module, "a torch.nn.Module")
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [] if optimizer is None else [optimizer]
    for each in optimizers:
        check_kind("optimizer", unwrap(each), torch.optim.Optimizer, "a torch.optim.Optimizer")
    check_kind("scaler", scaler, (torch.amp.GradScaler, DeviceLossScaler, NoneType), "a torch or halfstep GradScaler")
    check_kind("policy", policy, (Policy, NoneType), "a halfstep.Policy")
    check_count("accumulate", accumulate)
    if batch is not None and not callable(batch):
        what = "a function that returns the loss, or the arguments of the model: a tuple, a mapping or one tensor"
        check_kind("batch", batch, (tuple, list, Mapping, torch.Tensor), what)
    forward = Forward() if batch is None else run(model, batch)
    scalers = [] if scaler is None else [scaler]
    return findings_of(Facts(model, optimizers, scalers, policy=policy, accumulate=accumulate, forward=forward))


def log_findings(
    models: Iterable[nn.Module],
    optimizers: Sequence[Any],
    policy: Policy | None = None,
    *,
    scaling_is_known: bool = True,
) -> None:
    """Log the findings of ``check`` for models that were just prepared: one line per model, none without findings.

    HS111, a device without 16-bit units, is left out: it has a separate warning at the call that it concerns.

    Args:
        models: the models. Each is checked with the optimizers that train a part of it.
        optimizers: all optimizers. If there are none, the first step of any unprepared optimizer is checked later.
        policy: the policy of the models.
        scaling_is_known: True if only ``amp.initialize`` scales the losses.
    """
    if not optimizers:  # the user may have forgotten to pass one
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
    """Log the findings for an optimizer that stepped a model in ``_waiting``. Costs one id per parameter group."""
    firsts = {id(p) for group in optimizer.param_groups for p in group["params"][:1]} if _waiting else ()
    for model in [model for model, own in _waiting.items() if not own.isdisjoint(firsts)]:
        del _waiting[model]
        log_first_step(optimizer)


def log_first_step(optimizer: Any) -> None:
    """Log the findings after an optimizer's first step if its weights are 16-bit and it was never prepared."""
    if optimizer not in _seen:
        _seen.add(optimizer)
        params = params_of(optimizer)
        if any(map(is_half, params)) and attached_to(optimizer) is None:
            log_findings([nn.ParameterList(params)], [optimizer], scaling_is_known=False)


def finding(code: str, found: Found) -> Finding:
    """Make a finding from the result of a rule, with its code and its fix."""
    return Finding(code, *found[:4], found.fix or RULES[code][1])


def findings_of(facts: Facts, rules: Rules = RULES) -> list[Finding]:
    """Apply rules, by default all; errors come first, then codes in order."""
    found = [finding(code, Found(*each)) for code, (look, _) in rules.items() for each in look(facts)]
    return sorted(found, key=lambda each: (_ORDER[each.severity], each.code))
