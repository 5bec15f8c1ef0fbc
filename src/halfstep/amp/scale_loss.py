"""``amp.scale_loss``: the block around a backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..core.errors import ArgumentIndexError, ArgumentTypeError
from ..engine.casting import ops
from ..engine.stepping import blame
from .session import as_list, session_of

__all__ = ["scale_loss"]


@contextmanager
def scale_loss(
    loss: torch.Tensor,
    optimizers: torch.optim.Optimizer | list[torch.optim.Optimizer],
    loss_id: int = 0,
    model: torch.nn.Module | None = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[torch.Tensor]:
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

    Yields:
        The loss times the scale. With a static scale of 1.0, and when amp is disabled, nothing is multiplied.

    Raises:
        UsageError: before ``amp.initialize``, or for an optimizer that it did not return.
        ArgumentIndexError: for a ``loss_id`` there is no scaler for.
        ArgumentTypeError: if the loss is no floating tensor.
    """
    session, bindings = session_of(as_list(optimizers, "amp.scale_loss"), "amp.scale_loss")
    if not session.options.enabled:
        yield loss
        return
    if not isinstance(loss, torch.Tensor) or not loss.is_floating_point():
        kind = loss.dtype if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ArgumentTypeError(f"amp.scale_loss needs a floating tensor as loss, not {kind}.")
    scalers = session.loss_scalers
    if not -len(scalers) <= loss_id < len(scalers):
        raise ArgumentIndexError(
            f"loss_id={loss_id}, but amp.initialize was called with num_losses={len(scalers)}; "
            "pass num_losses= as many as there are losses with a scale of their own."
        )
    scaler = scalers[loss_id]
    scale = None if scaler.neutral else scaler.scale(loss.device)
    begun: set[int] = set()
    for binding in bindings:
        binding.begin(scale, begun)
    wide = loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss
    try:
        yield wide if scale is None else wide * scale
    except BaseException:
        for binding in bindings:
            binding.abandon()
        raise
    finally:
        ops.clear_cache()
    found_inf = torch.zeros((), device=loss.device)
    served: set[int] = set()
    for binding in bindings:
        binding.finish(scale, found_inf, served, delay=delay_unscale)
    if scale is None or delay_unscale or delay_overflow_check:
        return
    for binding in bindings:
        binding.note_pass(found_inf, scaler)
    scaler.update(found_inf, lambda: blame([binding.optimizer for binding in bindings]))
