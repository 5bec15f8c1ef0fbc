"""``apex.normalization.fused_layer_norm``, on torch's kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ....core.errors import ArgumentValueError

__all__ = [
    "FusedLayerNorm",
    "FusedLayerNormAffineFunction",
    "FusedLayerNormAffineMixedDtypesFunction",
    "FusedLayerNormFunction",
    "FusedRMSNorm",
    "FusedRMSNormAffineFunction",
    "FusedRMSNormAffineMixedDtypesFunction",
    "FusedRMSNormFunction",
    "MixedFusedLayerNorm",
    "MixedFusedRMSNorm",
    "fused_layer_norm",
    "fused_layer_norm_affine",
    "fused_rms_norm",
    "fused_rms_norm_affine",
    "manual_rms_norm",
    "mixed_dtype_fused_layer_norm_affine",
    "mixed_dtype_fused_rms_norm_affine",
]

Shape = int | list[int] | tuple[int, ...] | torch.Size


def _shape(normalized_shape: Shape) -> list[int]:
    return [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)


def _layer_norm(
    x: torch.Tensor, shape: Shape, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, out: torch.dtype
) -> torch.Tensor:
    if weight is not None and not weight.dtype is x.dtype is out:
        x, weight, bias = x.float(), weight.float(), None if bias is None else bias.float()
    return F.layer_norm(x, _shape(shape), weight, bias, eps).to(out)


def _rms_norm(x: torch.Tensor, shape: Shape, weight: torch.Tensor | None, eps: float, out: torch.dtype) -> torch.Tensor:
    if weight is not None and not weight.dtype is x.dtype is out:
        x, weight = x.float(), weight.float()
    return F.rms_norm(x, _shape(shape), weight, eps).to(out)


class _Fused(nn.Module):
    """The constructor of Apex's layers, which calls torch's constructor."""

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(_shape(normalized_shape), eps, elementwise_affine)
        self.memory_efficient = memory_efficient

    def _output_dtype(self, x: torch.Tensor) -> torch.dtype:
        return x.dtype


class _Mixed(_Fused):
    """The constructor of the layers whose output has the dtype of their parameters."""

    weight: nn.Parameter

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        *,
        memory_efficient: bool = False,
        elementwise_affine: bool = True,
    ) -> None:
        if not elementwise_affine:
            name = type(self).__name__
            plain = name.removeprefix("Mixed")
            raise ArgumentValueError(f"{name} has parameters; for elementwise_affine=False use {plain}.")
        super().__init__(normalized_shape, eps, True, memory_efficient)

    def _output_dtype(self, x: torch.Tensor) -> torch.dtype:
        return self.weight.dtype


class FusedLayerNorm(_Fused, nn.LayerNorm):
    """``torch.nn.LayerNorm`` whose output has the dtype of the input, for parameters of any dtype.

    Args:
        normalized_shape: the last dimensions, normalized together.
        eps: added to the variance.
        elementwise_affine: create a weight and a bias.
        memory_efficient: kept for Apex; not used.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize a floating tensor whose last dimensions are ``normalized_shape``."""
        dtype = self._output_dtype(input)
        return _layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps, dtype)


class FusedRMSNorm(_Fused, nn.RMSNorm):
    """``torch.nn.RMSNorm`` whose output has the dtype of the input; see ``FusedLayerNorm``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize a floating tensor whose last dimensions are ``normalized_shape``."""
        return _rms_norm(x, self.normalized_shape, self.weight, self.eps or 1e-5, self._output_dtype(x))


class MixedFusedLayerNorm(_Mixed, FusedLayerNorm):
    """``FusedLayerNorm`` whose output has the dtype of its parameters."""


class MixedFusedRMSNorm(_Mixed, FusedRMSNorm):
    """``FusedRMSNorm`` whose output has the dtype of its parameters."""


def fused_layer_norm(
    input: torch.Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> torch.Tensor:
    """Apply layer normalization without parameters."""
    return _layer_norm(input, normalized_shape, None, None, eps, input.dtype)


def fused_layer_norm_affine(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """Apply layer normalization; the output has the dtype of the input."""
    return _layer_norm(input, normalized_shape, weight, bias, eps, input.dtype)


def mixed_dtype_fused_layer_norm_affine(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """Apply layer normalization; the output has the dtype of the weight."""
    return _layer_norm(input, normalized_shape, weight, bias, eps, weight.dtype)


def fused_rms_norm(
    input: torch.Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> torch.Tensor:
    """Apply RMS normalization without a parameter."""
    return _rms_norm(input, normalized_shape, None, eps, input.dtype)


def fused_rms_norm_affine(
    input: torch.Tensor,
    weight: torch.Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """Apply RMS normalization; the output has the dtype of the input."""
    return _rms_norm(input, normalized_shape, weight, eps, input.dtype)


def mixed_dtype_fused_rms_norm_affine(
    input: torch.Tensor,
    weight: torch.Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """Apply RMS normalization; the output has the dtype of the weight."""
    return _rms_norm(input, normalized_shape, weight, eps, weight.dtype)


def manual_rms_norm(input: torch.Tensor, normalized_shape: Shape, weight: Any, eps: float) -> torch.Tensor:
    """Apply RMS normalization: the reference for the fused functions."""
    return _rms_norm(input, normalized_shape, weight, eps, input.dtype if weight is None else weight.dtype)


# ---- what Apex had as functions for autograd; torch's own differentiate themselves


class FusedLayerNormFunction:
    """``fused_layer_norm`` by ``apply``."""

    apply = staticmethod(fused_layer_norm)


class FusedLayerNormAffineFunction:
    """``fused_layer_norm_affine`` by ``apply``."""

    apply = staticmethod(fused_layer_norm_affine)


class FusedLayerNormAffineMixedDtypesFunction:
    """``mixed_dtype_fused_layer_norm_affine`` by ``apply``."""

    apply = staticmethod(mixed_dtype_fused_layer_norm_affine)


class FusedRMSNormFunction:
    """``fused_rms_norm`` by ``apply``."""

    apply = staticmethod(fused_rms_norm)


class FusedRMSNormAffineFunction:
    """``fused_rms_norm_affine`` by ``apply``."""

    apply = staticmethod(fused_rms_norm_affine)


class FusedRMSNormAffineMixedDtypesFunction:
    """``mixed_dtype_fused_rms_norm_affine`` by ``apply``."""

    apply = staticmethod(mixed_dtype_fused_rms_norm_affine)
