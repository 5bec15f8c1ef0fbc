"""``amp.scale_loss``: the block around a backward pass."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from ..casting.dynamo import eager
from ..core.checks import check_flag
from ..core.errors import ArgumentIndexError, ArgumentTypeError
from ..stepping.scaled_backward import ScaledBackward
from .session import session_of

__all__ = ["scale_loss"]


@eager
def scale_loss(
    loss: torch.Tensor,
    optimizers: torch.optim.Optimizer | list[torch.optim.Optimizer],
    loss_id: int = 0,
    model: torch.nn.Module | None = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> AbstractContextManager[torch.Tensor]:
    """Scale a loss for its backward pass, and unscale the gradients of the pass.

    ::

        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()

    After the block ``p.grad`` is unscaled: the gradients of the pass are added to those from before it. The gradient
    of a 16-bit parameter with a master is fp32. If one of the new gradients was inf or NaN, the next ``step`` of each
    optimizer given here is skipped, and a dynamic scale is lowered. Gradients of a skipped step that are still there
    when the next block opens are set to zero. If an exception leaves the block, the gradients are those from before it,
    and the scale does not change. With a static scale of 1.0 and without masters the block does nothing at all.

    Args:
        loss: a tensor of any floating dtype on any device; 16-bit losses are scaled in fp32.
        optimizers: those whose parameters get gradients from this backward pass.
        loss_id: which loss scaler to use, from 0 on and below ``num_losses`` of ``amp.initialize``.
        model: accepted for Apex's sake, not used.
        delay_unscale: accepted for Apex's sake: gradients accumulate rightly without it, and they are unscaled at once
            with it, too. The scale does not move until the next pass without it, and in the block of the next pass
            ``p.grad`` has the gradients of both.
        delay_overflow_check: unscale, but neither move the scale nor skip a step for this pass.

    Returns:
        A context manager whose value is the loss times the scale. With a static scale of 1.0, and when amp is
        disabled, nothing is multiplied.

    Raises:
        UsageError: before ``amp.initialize``, without an optimizer or for one that it did not return; from the block,
            if another block of the optimizer is open, or if ``backward`` was called on the loss that is not scaled.
        ArgumentIndexError: for a ``loss_id`` there is no scaler for.
        ArgumentTypeError: if the loss is no floating tensor, ``loss_id`` no whole number, or a switch neither True nor
            False.
    """
    session, attached = session_of(optimizers, "amp.scale_loss")
    if not session.options.enabled:
        return nullcontext(loss)
    scalers = session.loss_scalers
    if isinstance(loss_id, bool) or not isinstance(loss_id, int):
        raise ArgumentTypeError(f"loss_id={loss_id!r} must be a whole number: which loss this is, counted from 0.")
    if not 0 <= loss_id < len(scalers):
        raise ArgumentIndexError(
            f"loss_id={loss_id}, but amp.initialize was called with num_losses={len(scalers)}; count losses from 0, "
            "and pass num_losses= as many as there are losses with a scale of their own."
        )
    delay, check = False, True
    if delay_unscale is not False or delay_overflow_check is not False:
        delay = check_flag("delay_unscale", delay_unscale)
        check = not check_flag("delay_overflow_check", delay_overflow_check)
    passes = [one.passes for one in attached]
    return ScaledBackward(loss, passes, scalers[loss_id], name="amp.scale_loss", delay=delay, check=check)
