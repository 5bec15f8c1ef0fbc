"""Products on kernels for formats, for ``Recipe(backend="torchao")``: torchao's ``to_mx`` and torch's ``scaled_mm``.

Its functions are called, and none of its tensor subclasses is made. MXFP8 is prototype code of torchao, so one version
is allowed, the one whose results the tests compare with the emulation.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.errors import ArgumentValueError, UsageError
from ..core.text import install_line
from .format import FORMATS, Format
from .quantize import quantize

__all__ = ["MULTIPLE", "check_products", "scaled_product"]

MULTIPLE = 16
"""The number that divides all sizes of the operands of ``scaled_mm`` on a GPU."""

_VERSION = "0.18"
_WORD = 'leave out backend="torchao", and halfstep emulates the format.'
Pair = tuple[Format | None, Format | None]


@functools.cache
def _mx_functions() -> Any:
    """The module of torchao that has ``to_mx``.

    Raises:
        UsageError: if torchao is missing, or has another version.
    """
    try:
        found = importlib.metadata.version("torchao")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if not found.startswith(f"{_VERSION}."):
        raise UsageError(
            f'backend="torchao" calls prototype functions of torchao {_VERSION}, and this environment has {found}. '
            f"{install_line('torchao')}, or {_WORD}"
        )
    return importlib.import_module("torchao.prototype.mx_formats.mx_tensor")


def check_products(pairs: Sequence[Pair], hadamard: int, amax: str) -> None:
    """Check that torchao and ``scaled_mm`` have the products of a recipe.

    Raises:
        ArgumentValueError: for formats, a transform or delayed scales that they do not have.
        UsageError: if torchao is missing, or has another version.
    """
    kinds = [{_kind(format) for format in pair} for pair in pairs if pair != (None, None)]
    if hadamard or amax != "current" or any(len(kind) > 1 or None in kind for kind in kinds):
        raise ArgumentValueError(
            'backend="torchao" has products of two MXFP8 operands, or of two fp8 operands with scales of tensors or '
            f"rows, rounded to the nearest, with current scales and without hadamard. For other recipes {_WORD}"
        )
    _mx_functions()


def _kind(format: Format | None) -> str | None:
    if format is not None and format.replace(scale_rule="rceil") == FORMATS["mxfp8"]:
        return "mxfp8"
    plain = [FORMATS[f"fp8_{each}"].replace(block=block) for each in ("e4m3", "e5m2") for block in ("tensor", "row")]
    return "fp8" if format in plain else None


def scaled_product(a: Tensor, b: Tensor, formats: Pair, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """Compute ``a @ b.mT + bias`` with operands rounded to formats along their last dimensions.

    Args:
        a: a matrix, or a batch of matrices, which are multiplied one by one.
        b: a matrix, or a batch of the same size.
        formats: a pair that ``check_products`` takes.
        dtype: the dtype of the result. A GPU has no MXFP8 or row-wise kernel with an fp32 result: it is rounded to
            bfloat16 there.
        bias: added in fp32.

    Raises:
        UsageError: on a device without a kernel for the formats.
    """
    kind, scaling = _kind(formats[0]), "RowWise" if any(f and f.block == "row" for f in formats) else "TensorWise"
    check_device(a.device, kind)
    quantized: list[Tensor] = []
    for each, format in ((a, formats[0]), (b, formats[1])):
        assert format is not None
        if kind == "mxfp8":
            mx, wide = _mx_functions(), each.contiguous() if each.dtype is torch.bfloat16 else each.float().contiguous()
            scales, codes = mx.to_mx(wide, torch.float8_e4m3fn, 32, mx.ScaleCalculationMode(format.scale_rule))
        else:
            codes, found = quantize(each, format)
            assert isinstance(found, Tensor)
            rows = codes.shape[-2] if scaling == "RowWise" else 1  # both operands have scales of rows, or none has
            scales = found.expand(*codes.shape[:-2], rows, 1).contiguous()
        quantized += [codes, scales]
    multiply = _mx_product if kind == "mxfp8" else functools.partial(_fp8_product, getattr(F.ScalingType, scaling))
    if a.dim() > 2:
        each_of = zip(*(tensor.flatten(0, -3) for tensor in quantized), strict=True)
        product = torch.stack([multiply(*one) for one in each_of]).view(*a.shape[:-1], b.shape[-2])
    else:
        product = multiply(*quantized)
    return (product if bias is None else product + bias.float()).to(dtype)


def _fp8_product(scaling: Any, a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor) -> Tensor:
    wide = torch.float32 if a.is_cpu or scaling is F.ScalingType.TensorWise else torch.bfloat16
    return F.scaled_mm(a, b.T, scale_a, scaling, scale_b.T, scaling, output_dtype=wide)


def _mx_product(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor) -> Tensor:
    mx = _mx_functions()
    if a.is_cpu:  # it has the conversions, and no product of MX operands
        x, y = (mx.to_dtype(codes, s, codes.dtype, 32, torch.float32) for codes, s in ((a, scale_a), (b, scale_b)))
        return torch.mm(x, y.T)
    scale_a, scale_b = map(mx.to_blocked, (scale_a, scale_b))
    mode, order = F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4
    half = torch.bfloat16
    return F.scaled_mm(a, b.T, scale_a, mode, scale_b, mode, swizzle_a=order, swizzle_b=order, output_dtype=half)


def check_device(device: torch.device, kind: str | None) -> None:
    """Check that a device has kernels for MXFP8 or fp8.

    Raises:
        UsageError: if it has none.
    """
    least = (10, 0) if kind == "mxfp8" else (8, 9)
    if device.type != "cpu" and (device.type != "cuda" or torch.cuda.get_device_capability(device) < least):
        raise UsageError(
            f"scaled_mm has no {kind} product on {device}: it needs a CPU, or a CUDA device of capability "
            f"{least[0]}.{least[1]}. Move the model, or {_WORD}"
        )
