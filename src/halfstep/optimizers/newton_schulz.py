"""The Newton-Schulz iteration of Muon on stacks of matrices: one batched product for all matrices of a shape."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..core.hardware import has_units

__all__ = ["counts_of", "matrix_shape", "parts_of", "product_dtype", "unit_singular_values"]


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """Rows and columns of the matrices that a weight of this shape is.

    A weight of 3 dimensions is a stack: the first one counts matrices. Of more dimensions, as a convolution's, all but
    the first are columns of one matrix, as in Keller Jordan's reference.
    """
    if len(shape) <= 3:
        return shape[-2], shape[-1]
    return shape[0], math.prod(shape[1:])


def product_dtype(param: torch.Tensor, chosen: torch.dtype | None) -> torch.dtype:
    """In which dtype the products for a weight run: as chosen, or bfloat16 on a device with units for it, else float32.

    Weights in float64 are multiplied in float64.
    """
    if chosen is not None or param.dtype is torch.float64:
        return chosen or torch.float64
    return torch.bfloat16 if has_units(param.device, torch.bfloat16, "product") else torch.float32


def counts_of(params: Sequence[torch.Tensor]) -> list[int]:
    """How many matrices each weight is."""
    return [p.shape[0] if p.dim() == 3 else 1 for p in params]


def parts_of(stack: torch.Tensor, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The part of a contiguous stack of shape [matrices, rows, columns] that is of each weight, in its shape."""
    return [part.view(p.shape) for part, p in zip(stack.split(counts_of(params)), params, strict=True)]


def unit_singular_values(
    stack: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Matrices with the singular vectors of those given, and singular values of about 1: between 0.5 and 1.5.

    For each matrix X, scaled to a Frobenius norm of 1, ``steps`` times::

        X = a X + (b G + c G G) X  where G = X X^T

    Source: K. Jordan et al., https://kellerjordan.github.io/posts/muon/, as ``torch.optim.Muon`` has it.

    Args:
        stack: of shape [matrices, rows, columns]; overwritten.
        coefficients: a, b and c.
        steps: how many times.
        eps: the least norm that a matrix is divided by.

    Returns:
        A tensor of the shape and dtype of ``stack``.
    """
    a, b, c = coefficients
    wide = torch.promote_types(stack.dtype, torch.float32)
    norms = torch.linalg.vector_norm(stack, dim=(-2, -1), keepdim=True, dtype=wide)
    x = stack.div_(norms.clamp_(min=eps))
    tall = x.size(-2) > x.size(-1)
    if tall:
        x = x.mT
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
