"""fp32 gradients on 16-bit parameters, for optimizers that keep masters themselves and step on the model's parameters;
and 16-bit gradients on fp32 weights that have 16-bit copies.

A backward pass leaves 16-bit gradients: of 16-bit parameters always, which is what DistributedDataParallel and an
optimizer's cheapest step want, of fp32 weights where forward used the copy. They become fp32 when they are unscaled,
or when a second pass is added to them: nothing is lost to 16 bits in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...core.formats import is_half
from ...kernels import eager
from ...kernels.plan import PlanCache

__all__ = ["WideGradients", "scale_grad", "set_grad"]


def set_grad(param: torch.Tensor, grad: torch.Tensor) -> None:
    """Give a parameter a gradient, of another dtype than its own if need be (torch 2.13, ``Tensor.grad_dtype``)."""
    if getattr(param, "grad_dtype", grad.dtype) is not grad.dtype:
        param.grad = None
        param.grad_dtype = grad.dtype
    param.grad = grad


@torch.no_grad()
def scale_grad(param: torch.Tensor, scale: torch.Tensor | None) -> None:
    """Scale a gradient for the pass that comes, in the dtype of that pass."""
    grad = param.grad
    assert grad is not None
    if scale is not None:
        scale = scale.to(grad.device, non_blocking=True)
    if grad.dtype is param.dtype:
        if scale is not None:
            grad.mul_(scale)
        return
    param.grad = None
    param.grad_dtype = param.dtype
    param.grad = (grad if scale is None else grad * scale).to(param.dtype)


class WideGradients:
    """The way from 16-bit gradients to fp32 ones, for the parameters of one optimizer.

    Args:
        may_narrow: whether an fp32 parameter may have gradients of 16 bits; without it none may.
    """

    def __init__(self, may_narrow: Callable[[torch.Tensor], bool] | None = None) -> None:
        self._may_narrow = may_narrow
        self._plans = PlanCache()

    def takes(self, param: torch.Tensor) -> bool:
        """Whether gradients of this parameter may have 16 bits."""
        return is_half(param) or (self._may_narrow is not None and self._may_narrow(param))

    def open(self, params: Sequence[torch.Tensor]) -> None:
        """Let the next backward pass bring gradients in 16 bits where it computes them so, where there are none now.

        An fp32 weight takes any dtype for that pass: of a use in fp32 the gradient comes in fp32.
        """
        for param in params:
            if param.grad is None:
                dtype = param.dtype if is_half(param) or not self.takes(param) else None
                if param.grad_dtype is not dtype:
                    param.grad_dtype = dtype

    def reset(self, params: Sequence[torch.Tensor]) -> None:
        """Let the next backward pass bring gradients of the parameters' own dtype, where there are none now."""
        for param in params:
            if param.grad is None and param.grad_dtype is not param.dtype:
                param.grad_dtype = param.dtype

    @torch.no_grad()
    def collect(
        self,
        params: Sequence[torch.Tensor],
        before: dict[torch.Tensor, torch.Tensor],
        inv_scale: torch.Tensor | None,
        found_inf: torch.Tensor,
        seen: set[int],
    ) -> None:
        """Make fp32 gradients of new dense 16-bit ones, times ``inv_scale``, plus what was there before the pass.

        Args:
            params: of any dtype; those with other gradients are passed over.
            before: the gradients set aside before the pass; those that are added are taken out.
            inv_scale: 0-dim float32 tensor; with None only gradients that are to be added to others are widened.
            found_inf: 0-dim float32 tensor, set to 1.0 if a new gradient holds inf or NaN and ``inv_scale`` is given.
            seen: identities of parameters already served in this pass; extended.
        """
        first: list[torch.Tensor] = []
        again: list[torch.Tensor] = []
        for param in params:
            grad = param.grad
            if grad is None or not is_half(grad) or grad.is_sparse or id(param) in seen:
                continue
            if param in before:
                again.append(param)
            elif inv_scale is not None:
                first.append(param)
        for slot, rows in (("first", first), ("again", again)):
            if not rows:
                continue
            grads: list[torch.Tensor] = [param.grad for param in rows]  # type: ignore[misc]
            if slot == "first":
                targets = [torch.empty_like(grad, dtype=torch.float32) for grad in grads]
            else:
                targets = [before.pop(param).float() for param in rows]
            plan = self._plans.get(slot, rows, grads, targets)
            eager.unscale_into(plan, grads, targets, inv_scale, found_inf, accumulate=slot == "again")
            for param, target in zip(rows, targets, strict=True):
                set_grad(param, target)
            seen.update(map(id, rows))
