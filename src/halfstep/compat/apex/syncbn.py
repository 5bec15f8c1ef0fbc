"""``syncbn``, the extension behind Apex's SyncBatchNorm: batch statistics, their merging, and the passes in pieces.

Inputs are [N, C, ...], or [..., C] in the functions with ``c_last``. Statistics are fp32, [C].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..sync_batchnorm import normalize

__all__ = [
    "batchnorm_backward",
    "batchnorm_backward_c_last",
    "batchnorm_forward",
    "batchnorm_forward_c_last",
    "reduce_bn",
    "reduce_bn_c_last",
    "relu_bw_c_last",
    "welford_mean_var",
    "welford_mean_var_c_last",
    "welford_parallel",
]

Maybe = Tensor | None


def _last(x: Tensor) -> Tensor:
    """Return a tensor in fp32 with its channels last."""
    return x.float().movedim(1, -1)


def _columns(x: Tensor) -> Tensor:
    return x.float().reshape(-1, x.shape[-1])


def welford_mean_var_c_last(input: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel."""
    var, mean = torch.var_mean(_columns(input), 0, correction=0)
    return mean, var


def welford_mean_var(input: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel."""
    return welford_mean_var_c_last(_last(input))


def welford_parallel(
    mean_feature_nodes: Tensor, var_biased: Tensor, numel: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Merge the statistics of several batches, weighted by the batch sizes.

    Args:
        mean_feature_nodes: the mean of each batch, [batches, C].
        var_biased: the biased variance of each batch, [batches, C].
        numel: the count of values per channel in each batch, [batches].
        eps: added to the variance under the root.

    Returns:
        Mean, biased variance and 1 / standard deviation, [C] each.
    """
    share = (numel.double() / numel.sum())[:, None]
    mean = (share * mean_feature_nodes.double()).sum(0)
    var = (share * (var_biased.double() + (mean_feature_nodes.double() - mean).square())).sum(0)
    return mean.float(), var.float(), (var + eps).rsqrt().float()


def batchnorm_forward_c_last(
    input: Tensor, z: Maybe, mean: Tensor, inv_std: Tensor, weight: Maybe, shift: Maybe, fuse_relu: bool = False
) -> Tensor:
    """Compute ``(input - mean) * inv_std * weight + shift + z``, and ReLU, in the dtype of the input."""
    y = _normalize(input, z, mean, inv_std, weight, shift)
    return (y.relu() if fuse_relu else y).to(input.dtype)


def batchnorm_forward(input: Tensor, mean: Tensor, inv_std: Tensor, weight: Maybe, shift: Maybe) -> Tensor:
    """Compute ``(input - mean) * inv_std * weight + shift`` in the dtype of the input."""
    y = batchnorm_forward_c_last(_last(input), None, mean, inv_std, weight, shift)
    return y.movedim(-1, 1).to(input.dtype)


def reduce_bn_c_last(
    grad_output: Tensor, input: Tensor, mean: Tensor, inv_std: Tensor, weight: Maybe
) -> tuple[Tensor, Tensor, Maybe, Maybe]:
    """Sum ``grad_output`` and ``grad_output * (input - mean)``, and compute the gradients of weight and shift."""
    dy = _columns(grad_output)
    sum_dy, sum_dy_xmu = dy.sum(0), (dy * (_columns(input) - mean)).sum(0)
    if weight is None:
        return sum_dy, sum_dy_xmu, None, None
    return sum_dy, sum_dy_xmu, (sum_dy_xmu * inv_std).to(weight.dtype), sum_dy.to(weight.dtype)


def reduce_bn(grad_output: Tensor, input: Tensor, *others: Any) -> tuple[Tensor, Tensor, Maybe, Maybe]:
    """Run ``reduce_bn_c_last`` with the channels in dimension 1."""
    return reduce_bn_c_last(_last(grad_output), _last(input), *others)


def batchnorm_backward_c_last(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    inv_std: Tensor,
    weight: Maybe,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    """Compute the gradient of the input from the sums over all batches and the count of values."""
    n = count.sum()
    centred = grad_output.float() - sum_dy / n - (input.float() - mean) * inv_std.square() * (sum_dy_xmu / n)
    scale = inv_std if weight is None else inv_std * weight.float()
    return (centred * scale).to(input.dtype)


def batchnorm_backward(grad_output: Tensor, input: Tensor, *others: Any) -> Tensor:
    """Run ``batchnorm_backward_c_last`` with the channels in dimension 1."""
    return batchnorm_backward_c_last(_last(grad_output), _last(input), *others).movedim(-1, 1).to(input.dtype)


def relu_bw_c_last(
    grad_output: Tensor, input: Tensor, z: Maybe, mean: Tensor, inv_std: Tensor, weight: Maybe, shift: Maybe
) -> Tensor:
    """Return ``grad_output``, zeroed where the normalized sum is not above zero."""
    y = _normalize(input, z, mean, inv_std, weight, shift)
    return torch.where(y > 0, grad_output, 0.0).to(grad_output.dtype)


def _normalize(x: Tensor, z: Maybe, mean: Tensor, inv_std: Tensor, *affine: Maybe) -> Tensor:
    """Run ``normalize`` in fp32 and add ``z``."""
    weight, shift = (None if t is None else t.float() for t in affine)
    y = normalize(x.float(), mean, inv_std, weight, shift)
    return y if z is None else y + z.float()
