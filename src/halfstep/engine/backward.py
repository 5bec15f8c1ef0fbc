"""One scaled backward pass, whoever asks for it: the order of calls between a loss scale and some bindings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ..core.errors import ArgumentTypeError
from ..core.formats import is_half
from .casting import ops
from .ranks import Pass
from .scaling import LossScaler
from .stepping import Binding, settle

__all__ = ["conclude", "scaled_backward"]


@contextmanager
def scaled_backward(
    loss: torch.Tensor,
    bindings: Sequence[Binding],
    scaler: LossScaler,
    *,
    name: str,
    found_inf: torch.Tensor | None = None,
    delay: bool = False,
    check: bool = True,
) -> Iterator[torch.Tensor]:
    """Scale a loss; after the block, unscale the gradients that its backward pass brought and move the scale.

    Args:
        loss: a floating tensor on any device; a 16-bit one is scaled in fp32.
        bindings: those of the optimizers whose parameters get gradients.
        scaler: the loss scale.
        name: who asks, for the message of an error.
        found_inf: 0-dim float32 tensor, set to 1.0 if a new gradient holds inf or NaN. With None a static scale of
            1.0 neither scales nor looks.
        delay: leave the gradients scaled and the scale where it is.
        check: False moves no scale and skips no step for this pass.

    Yields:
        The scaled loss.

    Raises:
        ArgumentTypeError: if the loss is no floating tensor.
        LossScaleCollapsed: if the scale has been at its floor for too many overflows in a row.
    """
    if not isinstance(loss, torch.Tensor) or not loss.is_floating_point():
        kind = loss.dtype if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ArgumentTypeError(f"{name} needs a floating tensor as loss, not {kind}.")
    scale = None if found_inf is None and scaler.neutral else scaler.scale(loss.device)
    alone = len(bindings) == 1  # no other optimizer can have the same parameters
    begun: set[int] | None = None if alone else set()
    for binding in bindings:
        binding.begin(scale, begun)
    wide = loss.float() if is_half(loss) else loss
    try:
        yield wide if scale is None else wide * scale
    except BaseException:
        for binding in bindings:
            binding.abandon()
        raise
    finally:
        ops.clear_cache()
    if found_inf is None:
        found_inf = torch.zeros((), device=loss.device)
    served: set[int] | None = None if alone else set()
    for binding in bindings:
        binding.finish(scale, found_inf, served, delay=delay)
    if scale is not None and check and not delay:
        conclude(bindings, scaler, found_inf)


def conclude(bindings: Sequence[Binding], scaler: LossScaler, found_inf: torch.Tensor) -> None:
    """Let the next step of each optimizer and the loss scale know what a pass found.

    While other ranks do not have these gradients, nobody is told: the next pass that they average, or ``step``, does.
    Nor does a pass count that has brought no gradients: under FSDP2 without synchronization they come later.
    """
    if not any(binding.brought for binding in bindings):
        return
    passed = Pass(found_inf, scaler, dynamic=scaler.dynamic)
    for binding in bindings:
        binding.passes.append(passed)
    if not any(binding.ranks.behind for binding in bindings):
        settle(bindings)
