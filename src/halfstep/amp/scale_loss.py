"""``amp.scale_loss``: the block around a backward pass."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from ..core.errors import ArgumentIndexError
from ..engine.backward import scaled_backward
from .session import as_list, session_of

__all__ = ["scale_loss"]


def scale_loss(
    loss: torch.Tensor,
    optimizers: torch.optim.Optimizer | list[torch.optim.Optimizer],
    loss_id: int = 0,
    model: torch.nn.Module | None = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> AbstractContextManager[torch.Tensor]:
    """Scale a loss for its backward pass, and unscale the gradients that the pass brought.

    ::

        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()

    After the block the gradients of ``amp.master_params(optimizer)`` are unscaled fp32 numbers (O2; at other levels
    they have the dtype of the parameters), added to what was there before. If one of the new gradients was inf or
    NaN, the next ``step`` of each optimizer given here is skipped and a dynamic scale is lowered. If the block is
    left by an exception, the gradients are those from before it and the scale stays.

    Args:
        loss: a tensor of any floating dtype on any device; 16-bit losses are scaled in fp32.
        optimizers: those whose parameters get gradients from this backward pass.
        loss_id: which loss scaler to use, below ``num_losses`` of ``amp.initialize``.
        model: accepted for Apex's sake, not used.
        delay_unscale: leave the gradients scaled and unscale them with the next undelayed pass (or the step). Never
            necessary: gradients accumulate rightly without it.
        delay_overflow_check: unscale, but neither move the scale nor skip a step for this pass.

    Returns:
        A context manager whose value is the loss times the scale. With a static scale of 1.0, and when amp is
        disabled, nothing is multiplied.

    Raises:
        UsageError: before ``amp.initialize``, or for an optimizer that it did not return.
        ArgumentIndexError: for a ``loss_id`` there is no scaler for.
        ArgumentTypeError: if the loss is no floating tensor.
    """
    session, bindings = session_of(as_list(optimizers, "amp.scale_loss"), "amp.scale_loss")
    if not session.options.enabled:
        return nullcontext(loss)
    scalers = session.loss_scalers
    if not -len(scalers) <= loss_id < len(scalers):
        raise ArgumentIndexError(
            f"loss_id={loss_id}, but amp.initialize was called with num_losses={len(scalers)}; "
            "pass num_losses= as many as there are losses with a scale of their own."
        )
    return scaled_backward(
        loss,
        bindings,
        scalers[loss_id],
        name="amp.scale_loss",
        delay=delay_unscale,
        check=not delay_overflow_check,
    )
