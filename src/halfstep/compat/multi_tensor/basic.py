"""Scaling, sums and norms of many tensors, and the loss scale with hysteresis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...core.errors import ArgumentValueError
from ...core.loss_scale import DynamicLossScale, LossScaleState
from ...kernels import multi_tensor as ops
from .arguments import Flag, Lists, Number, take

__all__ = [
    "MultiTensorApply",
    "multi_tensor_applier",
    "multi_tensor_axpby",
    "multi_tensor_l2norm",
    "multi_tensor_l2norm_mp",
    "multi_tensor_l2norm_scale",
    "multi_tensor_scale",
    "multi_tensor_unscale_l2norm",
    "update_scale_hysteresis",
]


class MultiTensorApply:
    """A caller of operations with a chunk size: ``multi_tensor_applier(op, noop_flag, lists, *args)``.

    Args:
        chunk_size: the first argument of operations.
    """

    available = True
    import_err: Exception | None = None

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(self, op: Callable[..., Any], noop_flag_buffer: torch.Tensor, tensor_lists: Lists, *args: Any) -> Any:
        """Call ``op(chunk_size, noop_flag_buffer, tensor_lists, *args)``."""
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)
"""The instance that scripts import."""


def multi_tensor_scale(chunk_size: int, noop_flag: torch.Tensor, lists: Lists, scale: Number) -> None:
    """Compute ``out = in * scale`` for lists ``[in, out]``. Checks."""
    sources, targets = take(lists, 2)
    with Flag(noop_flag, sources) as found:
        ops.scale(sources, targets, scale, found)


def multi_tensor_axpby(
    chunk_size: int, noop_flag: torch.Tensor, lists: Lists, a: Number, b: Number, arg_to_check: int = -1
) -> None:
    """Compute ``out = a x + b y`` for lists ``[x, y, out]``. Checks x (0), y (1) or both (-1)."""
    xs, ys, targets = take(lists, 3)
    if arg_to_check not in (-1, 0, 1):
        raise ArgumentValueError(f"arg_to_check={arg_to_check!r} must be 0 (x), 1 (y) or -1 (both).")
    with Flag(noop_flag, xs) as found:
        if arg_to_check == -1:
            ops.axpby(a, xs, b, ys, targets, found)
        else:
            ops.l2norm((xs, ys)[arg_to_check], found_inf=found)  # before the output, which may be x or y
            ops.axpby(a, xs, b, ys, targets)


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: torch.Tensor, lists: Lists, per_tensor: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the 2-norm of ``lists[0]`` as one vector, float32 [1], and of each tensor, [n] or empty. Checks."""
    (tensors,) = take(lists, 1)
    with Flag(noop_flag, tensors) as found:
        norm, each = ops.l2norm(tensors, per_tensor=bool(per_tensor), found_inf=found)
    return norm.reshape(1), norm.new_zeros(0) if each is None else each


def multi_tensor_l2norm_mp(
    chunk_size: int, noop_flag: torch.Tensor, lists: Lists, per_tensor: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run ``multi_tensor_l2norm``, or return zeros if the flag is already set. Obeys."""
    before = noop_flag.clone()
    norms = multi_tensor_l2norm(chunk_size, noop_flag, lists, per_tensor)
    norm, each = (torch.where(before.to(n.device) != 0, 0.0, n) for n in norms)
    return norm, each


def multi_tensor_l2norm_scale(
    chunk_size: int, noop_flag: torch.Tensor, lists: Lists, scale: Number, per_tensor: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``out = in * scale`` for lists ``[in, out]``, and norms of ``out`` as ``multi_tensor_l2norm``. Checks."""
    multi_tensor_scale(chunk_size, noop_flag, lists, scale)
    return multi_tensor_l2norm(chunk_size, noop_flag, [lists[1]], per_tensor)


def multi_tensor_unscale_l2norm(
    chunk_size: int, noop_flag: torch.Tensor, lists: Lists, inv_scale: torch.Tensor, per_tensor: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the norms of ``lists[0]`` times ``inv_scale`` without changing the tensors. Checks."""
    norm, each = multi_tensor_l2norm(chunk_size, noop_flag, lists, per_tensor)
    factor = inv_scale.to(norm).abs().reshape(())
    return norm * factor, each * factor


@torch.no_grad()
def update_scale_hysteresis(
    current_scale: torch.Tensor,
    growth_tracker: torch.Tensor,
    hysteresis_tracker: torch.Tensor,
    found_inf: torch.Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
) -> torch.Tensor:
    """Update a loss scale in place on its device; it shrinks after ``hysteresis`` overflows.

    A finite step resets ``hysteresis_tracker``. The rule is ``halfstep.scaling.DynamicLossScale`` with
    ``sticky_backoff``; ``hysteresis_tracker`` counts the overflows that remain.

    Returns:
        ``current_scale``.

    Raises:
        ArgumentValueError: for a growth factor below 1, or a backoff factor that is not between 0 and 1. With a growth
            factor of 1.0 the scale never grows, but finite steps are still counted.
    """
    allowed = max(hysteresis, 1)
    grows = growth_factor != 1.0
    rule = DynamicLossScale(
        growth_factor=growth_factor if grows else 2.0,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval or None,
        backoff_interval=allowed,
        max_scale=None,
        sticky_backoff=True,
    )
    overflows = (allowed - hysteresis_tracker).clamp(0, allowed - 1)
    before = (current_scale.float(), growth_tracker.int(), overflows.int())
    after = rule.update(LossScaleState(*(tensor.reshape(()) for tensor in before)), found_inf.reshape(()))
    current_scale.copy_(after.scale if grows else after.scale.minimum(before[0]))
    growth_tracker.copy_(after.good)
    hysteresis_tracker.copy_(torch.where(found_inf.reshape(()) != 0, hysteresis_tracker - 1, hysteresis))
    return current_scale
