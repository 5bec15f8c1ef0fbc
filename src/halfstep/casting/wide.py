"""Products of 16-bit operands with an fp32 result, on devices with kernels for them: ``torch.mm(out_dtype=)``.

On other devices the fp32 kernel runs on the rounded operands (``rules.emulated``), whose products are exact in fp32.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

__all__ = ["has_kernel", "product"]

_OPERANDS = {"mm": 0, "bmm": 0, "matmul": 0, "linear": 0, "addmm": 1, "baddbmm": 1}
"""The ops that the kernels can compute, with the index of the first operand among the arguments."""


class _WideProduct(torch.autograd.Function):
    """A product of two matrices or batches of matrices, for which torch 2.8 to 2.13 has no derivative.

    The backward pass rounds the fp32 gradient, so its operands have 16 bits too.
    """

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return (torch.mm if a.dim() == 2 else torch.bmm)(a, b, out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = ctx.saved_tensors
        grad = grad.to(a.dtype)
        return grad @ b.mT, a.mT @ grad


def has_kernel(name: str, args: tuple[torch.Tensor, ...], kwargs: dict[str, Any]) -> bool:
    """True if the device has a kernel with an fp32 result for a call, as CUDA does (torch 2.8 to 2.13).

    Args:
        name: the name of the op.
        args: the arguments of the call.
        kwargs: the keyword arguments of the call.
    """
    if len(args) < 2 + _OPERANDS.get(name, sys.maxsize) or not kwargs.keys() <= {"bias", "beta", "alpha"}:
        return False
    a, b = args[_OPERANDS[name] :][:2]
    return a.is_cuda and (a.dim() > 1 == b.dim() - 1 or (a.dim() == b.dim() == 3 and a.shape[0] == b.shape[0]))


def product(name: str, *args: torch.Tensor, bias: Any = None, beta: float = 1, alpha: float = 1) -> torch.Tensor:
    """Compute an op of 16-bit operands with an fp32 result; ``has_kernel`` must be True for its arguments."""
    a, b = args[_OPERANDS[name] :][:2]
    if name == "linear":
        b, bias = b.mT, args[2] if len(args) > 2 else bias
    result: torch.Tensor = _WideProduct.apply(a if b.dim() == 3 else a.flatten(0, -2), b)  # type: ignore[no-untyped-call]
    result = result.unflatten(0, a.shape[:-1]) if a.dim() > b.dim() else result
    if _OPERANDS[name]:
        return beta * args[0] + alpha * result
    return result if bias is None else result + bias
