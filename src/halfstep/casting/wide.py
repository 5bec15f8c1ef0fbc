"""Products of 16-bit operands with an fp32 result, where the device has kernels for them: ``torch.mm(out_dtype=)``.

Elsewhere the fp32 kernel runs on the rounded operands (``rules.emulated``), whose products it gives exactly.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

__all__ = ["has_kernel", "product"]

_OPERANDS = {"mm": 0, "bmm": 0, "matmul": 0, "linear": 0, "addmm": 1, "baddbmm": 1}
"""The place of the first operand among the arguments of the ops that the kernels can compute."""


class _WideProduct(torch.autograd.Function):
    """A product of two matrices or batches of matrices. torch has no derivative of it (2.8 to 2.13).

    The backward pass has 16-bit operands too: it rounds the fp32 gradient.
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
    """True if a device has a kernel that gives the fp32 result of a call. CUDA has (torch 2.8 to 2.13).

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
    """Compute an op of 16-bit operands with an fp32 result. Arguments as of the op, for which there is a kernel."""
    a, b = args[_OPERANDS[name] :][:2]
    if name == "linear":
        b, bias = b.mT, args[2] if len(args) > 2 else bias
    result: torch.Tensor = _WideProduct.apply(a if b.dim() == 3 else a.flatten(0, -2), b)  # type: ignore[no-untyped-call]
    result = result.unflatten(0, a.shape[:-1]) if a.dim() > b.dim() else result
    if _OPERANDS[name]:
        return beta * args[0] + alpha * result
    return result if bias is None else result + bias
