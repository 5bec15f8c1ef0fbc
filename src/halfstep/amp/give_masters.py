"""``amp.give_masters``: fp32 masters for an optimizer created after its model was cast, as trainers do."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..core.checks import check_flag
from ..core.inner_optimizers import params_of
from ..core.policy import Policy
from ..parameters.master_registry import keeper_of
from ..stepping.attached import attached_to
from ..stepping.prepare import check, prepare_optimizer
from .arguments import as_optimizers

__all__ = ["give_masters", "has_masters"]


def give_masters(
    optimizer: torch.optim.Optimizer, weights: Mapping[torch.Tensor, torch.Tensor] | None = None, *, fused: bool = True
) -> torch.optim.Optimizer:
    """Give fp32 masters to an optimizer whose model is already cast to 16 bits.

    ::

        weights = {p: p.detach() for p in model.parameters()}
        amp.decorate(model, level="O2", save_dtype="float32")
        optimizer = amp.give_masters(make_optimizer(model), weights)

    The two calls are equivalent to ``amp.decorate(model, optimizer, level="O2")``.

    Args:
        optimizer: the optimizer, changed in place. Its 16-bit parameters get masters.
        weights: the fp32 weights before the cast, by parameter. A master starts from the fp32 weight if it still rounds
            to the parameter, and from the 16-bit weight otherwise.
        fused: see ``amp.initialize``.

    Returns:
        The optimizer.

    Raises:
        ArgumentTypeError: if ``optimizer`` is not a ``torch.optim.Optimizer``.
        UsageError: if ``amp`` already prepared the optimizer.
    """
    as_optimizers("amp.give_masters", [optimizer])
    check("amp.give_masters", [], [optimizer], None)
    check_flag("fused", fused)
    params = params_of(optimizer)
    originals = {id(param): weights[param] for param in params if weights is not None and param in weights}
    alone = all(keeper_of(param) is None for param in params)
    prepare_optimizer(optimizer, Policy(master_weights=True), originals=originals, fused=fused and alone, own=alone)
    return optimizer


def has_masters(optimizer: torch.optim.Optimizer) -> bool:
    """True if ``amp`` prepared an optimizer and gave it fp32 masters."""
    attached = attached_to(optimizer)
    return attached is not None and attached.window.table.has_masters
