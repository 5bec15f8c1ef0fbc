"""Rules for a run while it steps, because their facts are gone later: gradients, and weights between steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..diagnostics.findings.facts import Facts
from ..diagnostics.findings.finding import Finding
from ..diagnostics.observe.samples import PROOF, grid_flags, is_on_grid, sample
from ..parameters.ledger import get_grads

__all__ = ["on_grid", "scaled_gradients", "without_gradient"]


def scaled_gradients(optimizer: torch.optim.Optimizer, scaler: Any) -> Iterator[Finding]:
    """HS123: an optimizer that steps with gradients that are still multiplied by the loss scale."""
    given = isinstance(scaler, torch.amp.GradScaler)
    name = type(optimizer).__name__
    fix = (
        "Step it by the scaler: scaler.step(optimizer), for each optimizer."
        if given
        else "Pass every optimizer to amp.initialize and to amp.scale_loss(loss, [first, second])."
    )
    text = f"{name}.step() uses gradients that are still multiplied by the loss scale."
    yield Finding("HS123", "error", name, text, {}, fix)


def without_gradient(model: nn.Module) -> Iterator[Finding]:
    """HS124: trained parameters of modules that ran and that no gradient has reached."""
    params = [p for p in model.parameters() if p.requires_grad]
    grads = get_grads(params)
    lost = [p for p, grad in zip(params, grads, strict=True) if grad is None]
    if lost and len(lost) < len(params):
        where = Facts(model, []).where(lost)
        text = f"No gradient reaches {len(lost)} of {len(params)} parameters: the graph is cut, or they are not used."
        fix = "Look for detach(), torch.no_grad() or .item() before the loss, or set requires_grad=False."
        yield Finding("HS124", "error", where, text, {"tensors": len(lost)}, fix)


def on_grid(model: nn.Module) -> bool:
    """True if all fp32 weights lie on the grid of a 16-bit format."""
    wide = [p for p in model.parameters() if p.dtype is torch.float32 and p.numel() >= PROOF and p.requires_grad]
    return bool(wide) and all(is_on_grid(grid_flags(sample(p.detach(), 4 * PROOF)).tolist()) for p in wide)
