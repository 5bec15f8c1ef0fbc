"""Casts of many small tensors in one multi-tensor call, for graphs that cast their parameters at the start."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["cast_together"]


class _Together(torch.autograd.Function):
    """Casts tensors in one call, and their gradients back in another."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        cast = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
        torch._foreach_copy_(cast, list(tensors))
        return tuple(cast)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        there = [grad for grad in grads if grad is not None]
        in_fp32 = [torch.empty_like(grad, dtype=torch.float32) for grad in there]
        torch._foreach_copy_(in_fp32, there)
        found = iter(in_fp32)
        return None, *(None if grad is None else next(found) for grad in grads)


def cast_together(dtype: torch.dtype, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast tensors of another dtype in one multi-tensor call; differentiable."""
    return tuple(_Together.apply(dtype, *tensors))  # type: ignore[no-untyped-call]
