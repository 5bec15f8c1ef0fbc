"""The Newton-Schulz iteration of Muon on stacks of matrices.

Two optimizations make it cheaper than the formula, for matrices of m rows and n columns, m <= n:

- Several iterations run on the Gram matrix G = X X^T, which is m x m, and X is multiplied once after them. The factor
  of each iteration is a polynomial in G, so all factors commute, and the next G is this one times the square of the
  factor. A pair of iterations costs 4 m^2 n + 10 m^3 operations instead of 8 m^2 n + 4 m^3. The idea is from T. Dao's
  gram-newton-schulz. A Gram matrix has the squares of the singular values, which 16 bits represent less accurately:
  with a new Gram matrix after every two iterations the result is as close to the float64 result as without it, and
  after every three it is not. In fp32 all iterations are one run. Relative errors in bfloat16 with runs of two, and
  without as in torch: 0.015 and 0.012 (normal numbers), 0.10 and 0.12 (condition 1e6), 0.51 and 0.56 (rank 2), 0.72
  and 0.75 (rank 1), 0.07 and 0.02 (equal singular values). For low ranks both mistake rounding errors of bfloat16
  for small singular values, and raise them.
- These products are symmetric. On a CPU, for large sizes, only the blocks below the diagonal are computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..core.hardware import has_units

_BLOCKS = {2: (1024, 256), 4: (512, 128), 8: (512, 128)}
"""By bytes per number: the row count from which symmetric products are faster in blocks, and the rows of a block."""
_WORTH_GRAM = 1.5  # columns per row from which runs on the Gram matrix need fewer operations
_FEW = 128  # rows: with fewer rows these runs are not faster

__all__ = ["counts_of", "matrix_shape", "parts_of", "product_dtype", "unit_singular_values"]


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """Return the rows and columns of the matrices of a weight.

    A weight of 3 dimensions is a stack, whose first dimension counts matrices. For more dimensions, as in convolutions,
    all dimensions except the first are columns of one matrix, as in Keller Jordan's reference.
    """
    return (shape[-2], shape[-1]) if len(shape) <= 3 else (shape[0], math.prod(shape[1:]))


def product_dtype(param: torch.Tensor, chosen: torch.dtype | None) -> torch.dtype:
    """Choose the dtype of a weight's products: the chosen one, bfloat16 on a device with units for it, else float32.

    Weights in float64 are multiplied in float64.
    """
    if chosen is not None or param.dtype is torch.float64:
        return chosen or torch.float64
    return torch.bfloat16 if has_units(param.device, torch.bfloat16, "product") else torch.float32


def counts_of(params: Sequence[torch.Tensor]) -> list[int]:
    """Count the matrices of each weight."""
    return [p.shape[0] if p.dim() == 3 else 1 for p in params]


def parts_of(stack: torch.Tensor, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Split a contiguous stack of shape [matrices, rows, columns] into the weights, each in its shape."""
    return [part.view(p.shape) for part, p in zip(stack.split(counts_of(params)), params, strict=True)]


def unit_singular_values(
    stack: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Compute matrices with the same singular vectors and singular values of about 1: between 0.5 and 1.5.

    For each matrix X, scaled to a Frobenius norm of 1, ``steps`` times::

        X = a X + (b G + c G G) X  where G = X X^T

    Source: K. Jordan et al., https://kellerjordan.github.io/posts/muon/, as ``torch.optim.Muon`` has it.

    Args:
        stack: a tensor of shape [matrices, rows, columns]; overwritten.
        coefficients: a, b and c.
        steps: the number of iterations.
        eps: the minimum norm by which a matrix is divided.

    Returns:
        A tensor of the shape and dtype of ``stack``.
    """
    wide = torch.promote_types(stack.dtype, torch.float32)
    if stack.device.type != "cpu":
        norms = torch.linalg.vector_norm(stack, dim=(-2, -1), keepdim=True, dtype=wide)
        return _iterate(stack.div_(norms.clamp_(min=eps)), coefficients, steps)
    for matrix in stack:  # on a CPU single products are faster than batched ones
        norm = torch.linalg.vector_norm(matrix, dtype=wide)
        matrix.copy_(_iterate(matrix.div_(norm.clamp_(min=eps)), coefficients, steps))
    return stack


def _iterate(x: torch.Tensor, coefficients: tuple[float, float, float], steps: int) -> torch.Tensor:
    """Run the iteration on a matrix or a stack of matrices."""
    a, b, c = coefficients
    tall = x.size(-2) > x.size(-1)
    if tall:
        x = x.mT.contiguous() if x.dim() == 2 else x.mT
    flat = x.dim() == 2
    for count in _runs(steps, x):
        gram = _symmetric(x, x.mT)
        rest = _symmetric(gram, gram, gram, b, c)  # the factor of an iteration is a + rest
        if count == 1:
            x = torch.addmm(x, rest, x, beta=a) if flat else torch.baddbmm(x, rest, x, beta=a)
            continue
        factor = rest.clone()
        factor.diagonal(dim1=-2, dim2=-1).add_(a)
        for _ in range(1, count):
            once = _symmetric(rest, gram, gram, a)
            gram = _symmetric(rest, once, once, a)
            rest = _symmetric(gram, gram, gram, b, c)
            factor = _symmetric(rest, factor, factor, a)
        x = factor @ x
    return x.mT if tall else x


def _runs(steps: int, x: torch.Tensor) -> list[int]:
    """Return the number of iterations on one Gram matrix, for each run."""
    if x.size(-2) < _FEW or x.size(-1) < _WORTH_GRAM * x.size(-2):
        return [1] * steps
    longest = 2 if x.dtype.itemsize == 2 else max(steps, 1)
    runs = [longest] * (steps // longest)
    if steps % longest:
        runs.insert(1, steps % longest)
    return runs


def _symmetric(
    left: torch.Tensor, right: torch.Tensor, add: torch.Tensor | None = None, beta: float = 1.0, alpha: float = 1.0
) -> torch.Tensor:
    """Compute ``alpha left right + beta add`` (or only ``left right``), which is symmetric."""
    if left.dim() == 3:
        return left.bmm(right) if add is None else torch.baddbmm(add, left, right, beta=beta, alpha=alpha)
    size = left.size(0)
    least, block = _BLOCKS[left.dtype.itemsize]
    if size < least:
        return left.mm(right) if add is None else torch.addmm(add, left, right, beta=beta, alpha=alpha)
    out = left.new_empty(size, size)
    for start in range(0, size, block):
        rows = slice(start, min(start + block, size))
        upto = slice(0, rows.stop)
        if add is None:
            torch.mm(left[rows], right[:, upto], out=out[rows, upto])
        else:
            torch.addmm(add[rows, upto], left[rows], right[:, upto], beta=beta, alpha=alpha, out=out[rows, upto])
        out[:start, rows] = out[rows, :start].mT
    return out
