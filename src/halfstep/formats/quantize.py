"""Tensors to and from a number format, and what they lose."""

from __future__ import annotations

from types import NoneType
from typing import Any

import torch

from ..core.checks import check_kind
from ..core.dtypes import parse_dtype
from ..core.errors import ArgumentIndexError, ArgumentTypeError, ArgumentValueError
from ..kernels.launch import backend_for
from ..torch_internals.torch_compat import is_fake
from .elements import values
from .format import EDEN_GROUP, Format
from .reference import bits, block_scales, eden, four_over_six, round_elements, tensor_scale

__all__ = ["Scales", "dequantize", "error", "quantize", "round_to"]

Scales = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""The scales of blocks; with e4m3 scales, a pair of them and the fp32 scale of the tensor."""

_WITHIN = (-1, -3)
"""The dimensions of a block in a blocked tensor: along ``dim``, and along the last of the other dimensions."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def quantize(
    tensor: torch.Tensor, format: Format | str, *, dim: int = -1, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, Scales]:
    """Quantize a tensor.

    Args:
        tensor: the tensor, in fp32, bfloat16 or float16, of any shape and layout.
        format: a ``Format``, or how one prints.
        dim: the dimension along which blocks lie. The sides of a square lie along ``dim`` and along the last of the
            other dimensions.
        generator: the source of the seed of stochastic rounding; torch's default generator if ``None``.

    Returns:
        The codes and the scales. Codes have the shape of the tensor and the dtype of the element: torch's own for
        float8 and int8 (in steps of 1/64), and one code in a byte for the shorter ones. Scales have the shape of the
        tensor with each block as one number (none for the block "tensor"): the codes' values times the scales are the
        numbers. With e4m3 scales they are a pair: scales of the blocks, and the fp32 scale of the tensor.

    Raises:
        ArgumentTypeError: for a dtype or layout that is not read, or a ``dim`` or ``generator`` of another type.
        ArgumentIndexError: for a dimension that the tensor does not have.
        ArgumentValueError: for a format that does not exist, or a size that the block does not divide.
    """
    format = Format.parse(format)
    _check(tensor, format, dim, generator)
    tensor = tensor.detach()  # codes have no gradient
    rounded, stored, _, of_tensor = _rounded(tensor, format, dim, None, _seed(format, tensor, generator))
    codes = _restored(_encode(rounded, format), format, tensor.shape, dim)
    plain = _of_each(stored, format, tensor.shape, dim)
    return codes, plain if of_tensor is None else (plain, of_tensor)


def dequantize(
    codes: torch.Tensor,
    scales: Scales,
    format: Format | str,
    *,
    dim: int = -1,
    dtype: torch.dtype | str = torch.float32,
) -> torch.Tensor:
    """Compute the numbers that codes and scales stand for: fp32 products of both, rounded once to ``dtype``.

    Args:
        codes: the first result of ``quantize``.
        scales: the second result of ``quantize``.
        format: the format of both.
        dim: the dimension along which blocks lie.
        dtype: the dtype of the result, or its name.

    Raises:
        ArgumentTypeError: if the codes have another dtype than the format's, or the scales are no pair where the format
            has one.
        ArgumentValueError: for a format that does not exist, a size that the block does not divide, or scales whose
            shape or kind of dtype does not fit the codes.
    """
    format, dtype = Format.parse(format), parse_dtype(dtype)
    check_kind("codes", codes, torch.Tensor, "a tensor")
    if codes.dtype is not format.numbers.dtype:
        raise ArgumentTypeError(
            f"The codes of {format} are {format.numbers.dtype}, not {codes.dtype}; pass what quantize returned."
        )
    _check_sizes(codes, format, dim)
    pair: Any = scales if isinstance(scales, (tuple, list)) else (scales,)
    if len(pair) != 1 + (format.scale == "e4m3") or not all(isinstance(each, torch.Tensor) for each in pair):
        kinds = "a pair, scales of blocks and the scale of the tensor" if format.scale == "e4m3" else "one tensor"
        raise ArgumentTypeError(f"The scales of {format} are {kinds}, not {scales!r}; pass what quantize returned.")
    bare = torch.empty(codes.shape, device="meta", dtype=torch.float32)  # shapes alone
    shape = _of_each(_blocked(bare, format, dim).sum(_WITHIN, keepdim=True), format, codes.shape, dim).shape
    if pair[0].shape != shape or not pair[0].is_floating_point():
        raise ArgumentValueError(
            f"Codes of shape {tuple(codes.shape)} in {format} along dim={dim} have floating scales of shape "
            f"{tuple(shape)}, not {pair[0].dtype} of shape {tuple(pair[0].shape)}; pass what quantize returned."
        )
    scale = pair[0].float() if len(pair) == 1 else pair[0].float() * pair[1]
    index = codes.contiguous().view(torch.uint8).long()
    numbers: torch.Tensor = values(format.element).to(codes.device)[index]
    blocks = _blocked(numbers, format, dim) * _blocked(scale, format, dim, sides=(1, 1))
    return _restored(blocks, format, codes.shape, dim).to(dtype)


def round_to(
    tensor: torch.Tensor,
    format: Format | str,
    *,
    dim: int = -1,
    amax: torch.Tensor | float | None = None,
    generator: torch.Generator | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Round a tensor to the numbers of a format: ``quantize`` and ``dequantize`` in one pass.

    Args:
        tensor: the tensor, in fp32, bfloat16 or float16, of any shape and layout.
        format: a ``Format``, or how one prints.
        dim: the dimension along which blocks lie.
        amax: for blocks that are whole tensors, the largest magnitude that the scale allows for, in place of the one
            in the tensor: delayed scaling. Greater numbers saturate, or overflow, as the format says.
        generator: the source of the seed of stochastic rounding; torch's default generator if ``None``.
        out: a tensor of the same shape and dtype to write the result to; it may be ``tensor``.

    Returns:
        The rounded numbers in the dtype of ``tensor``; ``out`` if it was given.

    Raises:
        ArgumentTypeError: for a dtype that is not read.
        ArgumentValueError: for a format that does not exist, a size that the block does not divide, an ``amax`` for
            another block, or an ``out`` of another shape or dtype.
    """
    format = Format.parse(format)
    _check(tensor, format, dim, generator)
    if amax is not None and format.block != "tensor":
        raise ArgumentValueError(
            f"amax= is for blocks that are whole tensors, and {format} has blocks of {format.block}; leave amax out."
        )
    if out is not None and (out.shape != tensor.shape or out.dtype is not tensor.dtype):
        raise ArgumentValueError(
            f"out= must have the shape and the dtype of the tensor, {tuple(tensor.shape)} and {tensor.dtype}, not "
            f"{tuple(out.shape)} and {out.dtype}."
        )
    seed = _seed(format, tensor, generator)
    if tensor.numel() and backend_for(tensor.device) == "compiled" and not is_fake(tensor):
        from . import compiled

        source = tensor.contiguous()
        target = out if out is not None and out.is_contiguous() else torch.empty_like(source)
        largest = None if amax is None else abs(float(amax))
        if compiled.round_to(source.detach(), target.detach(), format, dim, largest, seed):
            return target if out is None or out is target else out.copy_(target)
    rounded, _, scale, _ = _rounded(tensor, format, dim, amax, seed)
    result = _restored(rounded * scale, format, tensor.shape, dim).to(tensor.dtype)
    return result if out is None else out.copy_(result)


def error(tensor: torch.Tensor, format: Format | str, *, dim: int = -1) -> torch.Tensor:
    """Compute the signal-to-noise ratio of every block in dB: 10 log10 of the sum of its squares
    over the sum of the squares of its errors.

    Args:
        tensor: the tensor.
        format: a ``Format``, or how one prints.
        dim: the dimension along which blocks lie.

    Returns:
        The ratios, in the shape of the scales; inf where a block has no error.

    Raises:
        ArgumentTypeError: for a dtype that is not read.
        ArgumentValueError: for a format that does not exist, or a size that the block does not divide.
    """
    format = Format.parse(format)
    _check(tensor, format, dim)
    exact = tensor.detach().float()
    signal, noise = exact.double(), (exact - round_to(exact, format, dim=dim)).double()
    ratios = [_blocked(part, format, dim).square().sum(_WITHIN, keepdim=True) for part in (signal, noise)]
    decibels = torch.where(ratios[1] == 0, torch.inf, 10 * (ratios[0] / ratios[1]).log10())
    return _of_each(decibels, format, tensor.shape, dim).float()


def _check(tensor: torch.Tensor, format: Format, dim: int, generator: torch.Generator | None = None) -> None:
    check_kind("tensor", tensor, torch.Tensor, "a tensor")
    check_kind("generator", generator, (torch.Generator, NoneType), "a torch.Generator or None")
    if tensor.layout is not torch.strided:
        raise ArgumentTypeError(f"A tensor of layout {tensor.layout} is not quantized; pass a dense one: x.to_dense().")
    if tensor.dtype not in _DTYPES:
        raise ArgumentTypeError(
            f"{tensor.dtype} is not quantized; pass a tensor in float32, bfloat16 or float16: tensor.float()."
        )
    _check_sizes(tensor, format, dim)


def _check_sizes(tensor: torch.Tensor, format: Format, dim: int) -> None:
    check_kind("dim", dim, int, "an integer")
    if not -tensor.dim() <= dim < tensor.dim() and (tensor.dim() or format.block != "tensor"):
        raise ArgumentIndexError(f"dim={dim} is not a dimension of a tensor of shape {tuple(tensor.shape)}.")
    if (sides := format.sides) is None:
        return
    if tensor.dim() < 2 and sides[0] > 1:
        raise ArgumentValueError(
            f"Blocks of {format.block} need two dimensions, and the tensor has the shape {tuple(tensor.shape)}."
        )
    along = tensor.shape[dim]
    across = tensor.movedim(dim, -1).shape[-2] if sides[0] > 1 else 0
    corrects = format.scale_rule == "eden"
    groups = f" in groups of {EDEN_GROUP} numbers, as scale_rule='eden' has them," if corrects else ""
    for size, side in ((along, EDEN_GROUP if corrects else sides[1]), (across, sides[0])):
        if size % side:
            short = side - size % side
            raise ArgumentValueError(
                f"Blocks of {format.block}{groups} along dim={dim} do not fit the shape {tuple(tensor.shape)}: {size} "
                f"is not a multiple of {side}. Pad it with {short} zeros to {size + short}, or choose another format "
                "or dim."
            )


def _blocked(tensor: torch.Tensor, format: Format, dim: int, sides: tuple[int, int] | None = None) -> torch.Tensor:
    """View a tensor with the sides of a block as dimensions of their own, at the places ``_WITHIN``.

    Scales, of which each block has one, have the ``sides`` (1, 1).
    """
    if format.block == "tensor":
        return tensor.reshape(1, 1, 1, -1)
    moved = tensor.movedim(dim, -1) if tensor.dim() > 1 else tensor[None]
    height, width = sides or format.sides or (1, moved.shape[-1])
    rows, columns = moved.shape[-2] // height, moved.shape[-1] // width if width else 1
    blocks: torch.Tensor = moved.unflatten(-1, (columns, width)).unflatten(-3, (rows, height))
    return blocks


def _restored(blocks: torch.Tensor, format: Format, shape: torch.Size, dim: int) -> torch.Tensor:
    """View a blocked tensor in its shape again; with one number for each block, in the shape of the scales."""
    if format.block == "tensor":
        return blocks.reshape(shape)
    joined = blocks.flatten(-2).flatten(-3, -2)
    return (joined if len(shape) > 1 else joined[0]).movedim(-1, dim).contiguous()


def _of_each(numbers: torch.Tensor, format: Format, shape: torch.Size, dim: int) -> torch.Tensor:
    """One number for each block, in the shape of the scales."""
    return _restored(numbers, format, shape if format.block != "tensor" else torch.Size(), dim)


def _largest(blocks: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitudes of blocks; as integers, so that a NaN is above infinity."""
    if blocks.numel() == 0:
        return blocks.sum(_WITHIN, keepdim=True)
    magnitudes = bits(blocks.contiguous()) & 0x7FFFFFFF
    return magnitudes.amax(_WITHIN, keepdim=True).view(torch.float32)


def _scales(
    blocks: torch.Tensor, format: Format, amax: torch.Tensor | float | None, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    largest = _largest(blocks).contiguous()
    if amax is not None:  # the block is the whole tensor
        largest = torch.as_tensor(amax, dtype=torch.float32, device=blocks.device).abs()
    if format.scale != "e4m3":
        return *block_scales(largest, format, None), None
    of_tensor = tensor_scale(_largest(largest.reshape(1, 1, 1, -1)).reshape(()), format)
    scales = block_scales(largest, format, of_tensor)
    if format.scale_rule == "4over6":
        scales = four_over_six(blocks, scales, block_scales(largest, format, of_tensor, times=1.5), format)
    elif format.scale_rule == "eden":
        scales = eden(blocks, scales, of_tensor, format, seed)
    return *scales, of_tensor


def _seed(format: Format, tensor: torch.Tensor, generator: torch.Generator | None) -> int:
    if (format.rounding != "stochastic" and format.scale_rule != "eden") or is_fake(tensor):
        return 0
    return int(torch.randint(2**31, (), generator=generator, device=generator.device if generator else "cpu"))


def _rounded(
    tensor: torch.Tensor, format: Format, dim: int, amax: torch.Tensor | float | None, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return numbers of the element format in blocks, their scales as stored and in fp32, and the tensor's scale."""
    blocks, index = _blocked(tensor, format, dim).float(), None
    stored, inverse, scale, of_tensor = _scales(blocks, format, amax, seed)
    if format.rounding == "stochastic":
        index = torch.arange(tensor.numel(), device=tensor.device, dtype=torch.int64).view(tensor.shape)
        index = _blocked(index, format, dim)
    return round_elements(blocks * inverse, format, index, seed), stored, scale, of_tensor


def _encode(rounded: torch.Tensor, format: Format) -> torch.Tensor:
    """Return the codes of numbers of an element format."""
    element = format.numbers
    if element.dtype.is_floating_point:
        return rounded.to(element.dtype)
    finite = rounded.nan_to_num(0.0)  # the scale of its block is NaN already
    if element.dtype is torch.int8:
        return (finite * 64).to(torch.int8)
    magnitude = finite.abs()
    lowest = element.least_exponent + 127
    above = ((bits(magnitude) >> 23) - lowest).clamp(min=0)
    steps = torch.ldexp(magnitude, element.mantissa - element.least_exponent - above).to(torch.int32)
    sign = rounded.signbit().int() << (element.bits - 1)
    return (sign + (above << element.mantissa) + steps).to(torch.uint8)
