"""One training of a kind of model: in fp32, or at a level by three lines of halfstep."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from halfstep import amp
from tests.support.worlds import scaled_backward

from .kinds import Kind

__all__ = ["Losses", "train"]


class Losses(NamedTuple):
    """Of all optimizers together, in the first step and in the end."""

    begin: float
    end: float


def train(
    kind: Kind, level: str | None = None, dtype: torch.dtype = torch.bfloat16, steps: int | None = None, **options: Any
) -> Losses:
    """Train a new model of a kind.

    Args:
        kind: of model.
        level: the opt level; None is plain PyTorch in fp32.
        dtype: the 16-bit dtype of the level.
        steps: if not those of the kind.
        options: more of ``amp.initialize``.
    """
    steps = steps or kind.steps
    torch.manual_seed(0)
    models, losses = kind.make()
    if callable(losses):
        models, losses = [models], [losses]
    optimizers = [kind.optimizer(model.parameters(), lr=kind.lr) for model in models]
    if level is not None:
        if level == "O2":
            options = {**kind.at_o2, **options}
        amp.initialize(models, optimizers, opt_level=level, dtype=dtype, verbosity=0, **options)
    torch.manual_seed(1)
    found = []
    while len(found) < steps:
        total, skipped = 0.0, False
        for loss_of, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss = loss_of()
            if level is None:
                loss.backward()
            else:
                scaled_backward(loss, optimizer)
            optimizer.step()
            skipped |= level is not None and bool(optimizer.step_was_skipped)
            total += loss.item()
        if not skipped:  # float16 finds its loss scale in the first steps
            found.append(total)
    last = found[-(steps // 2 if kind.noise else 1) :]
    return Losses(found[0], sum(last) / len(last))
