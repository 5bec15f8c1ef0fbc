"""The arithmetic of formats in torch's own ops: what the fast back end has to give, bit for bit."""

from __future__ import annotations

import functools

import torch

from .format import EDEN_GROUP, Format

__all__ = [
    "GREATEST_INVERSE",
    "LEAST_BLOCK_SCALE",
    "LEAST_TENSOR_SCALE",
    "block_scales",
    "round_elements",
    "rule_addend",
]

GREATEST_INVERSE = 2.0**126
"""The greatest factor in front of elements: the scale of a smaller block would be a subnormal number."""
LEAST_TENSOR_SCALE = 2.0**-118
"""The least fp32 scale of a tensor beside e4m3 scales of its blocks: the product of both inverses stays finite."""
LEAST_BLOCK_SCALE = 2.0**-6
"""The least e4m3 scale of a block, as in torchao: the smallest normal number."""

_TO_SIX = 17 / 16 * 0.93
"""The factor of scales under the rule "eden" with which rounding to e2m1 has the least error (Quartet II)."""

_INF = 0x7F800000
_FRACTION = 0x7FFFFF


def bits(numbers: torch.Tensor) -> torch.Tensor:
    """View fp32 numbers as integers."""
    return numbers.view(torch.int32)


def rule_addend(format: Format) -> int:
    """Return the number that a scale rule adds to the bits of the largest magnitude before it reads the exponent.

    One addition is each of the four rules: a carry into the exponent is the step to the next power of two.
    """
    element = format.numbers
    greatest = int((element.greatest / 2.0**element.greatest_exponent - 1) * 2**23)
    half = 1 << (22 - element.mantissa)
    return {"floor": 0, "ceil": _FRACTION, "rceil": _FRACTION - greatest, "even": half}.get(format.scale_rule, 0)


def greatest_of(format: Format) -> float:
    """Return the number to which a scale maps the largest magnitude of a block."""
    return format.numbers.greatest / (_TO_SIX if format.scale_rule == "eden" else 1.0)


def greatest_scale(format: Format) -> float:
    """Return the e4m3 scale of the block with the largest magnitude: 256 if a rule may raise it afterwards."""
    return 256.0 if format.scale_rule in ("4over6", "eden") else 448.0


def tensor_scale(largest: torch.Tensor, format: Format) -> torch.Tensor:
    """Return the fp32 scale of a tensor with which e4m3 scales of its blocks reach ``greatest_scale``."""
    greatest = largest.new_tensor(greatest_scale(format) * greatest_of(format))
    scale = (largest / greatest).clamp(min=LEAST_TENSOR_SCALE)
    return torch.where(largest == 0, 1.0, scale)


BlockScales = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""The scales of blocks as they are stored, the factors in front of elements, and behind rounded elements."""


def block_scales(largest: torch.Tensor, format: Format, tensor: torch.Tensor | None, times: float = 1.0) -> BlockScales:
    """Compute the scales of blocks from the largest magnitudes in them.

    Args:
        largest: the largest magnitudes, in fp32; NaN where a block has one.
        format: the format.
        tensor: with e4m3 scales, the scale of the tensor.
        times: with e4m3 scales, a factor of them before they are rounded.
    """
    element = format.numbers
    # As a tensor: for a number divided by a tensor torch multiplies by the reciprocal, which rounds twice.
    greatest = largest.new_tensor(greatest_of(format))
    if tensor is not None:
        wanted = (largest / greatest) / tensor * times
        stored = wanted.clamp(LEAST_BLOCK_SCALE, 448.0).to(torch.float8_e4m3fn)
        scale = stored.float()
        return stored, tensor.reciprocal() / scale, scale * tensor
    if format.scale == "fp32":
        inverse = (greatest / largest).clamp(max=GREATEST_INVERSE)
        inverse = torch.where(largest == 0, 1.0, inverse)
        scale = inverse.reciprocal()
        return scale, inverse, scale
    exponent = ((bits(largest) + rule_addend(format)) >> 23) - element.greatest_exponent
    infinite = largest.isinf()
    if format.scale_rule == "rceil":
        exponent = torch.where(infinite, 254, exponent)
    exponent = exponent.clamp(0, 254)
    # 2**127 times the greatest number of any other element is inf already.
    poisoned = largest.isnan() | infinite if element.greatest_exponent == 0 else largest.isnan()
    exponent = torch.where(poisoned, 255, exponent)
    scale = torch.where(poisoned, torch.nan, power_of_two(exponent))
    inverse = torch.where(poisoned, torch.nan, power_of_two(254 - exponent))
    return exponent.to(torch.uint8).view(torch.float8_e8m0fnu), inverse, scale


def four_over_six(blocks: torch.Tensor, six: BlockScales, four: BlockScales, format: Format) -> BlockScales:
    """Choose, for each block, the scales with the smaller squared error.

    Args:
        blocks: the numbers, with the sides of a block as last and third last dimension.
        six: the scales that map the largest magnitude to 6.
        four: the scales that map it to 4.
        format: the format.
    """
    nearest = format.replace(rounding="even")
    lost = [blocks - round_elements(blocks * inverse, nearest, None, 0) * scale for _, inverse, scale in (six, four)]
    errors = [each.double().square().sum((-1, -3), keepdim=True) for each in lost]
    stored, inverse, scale = (torch.where(errors[1] < errors[0], b, a) for a, b in zip(six, four, strict=True))
    return stored, inverse, scale


def eden(blocks: torch.Tensor, scales: BlockScales, of_tensor: torch.Tensor, format: Format, seed: int) -> BlockScales:
    """Correct scales of groups of blocks by what rounding adds or takes away, and round them stochastically.

    Args:
        blocks: the numbers, with the sides of a block as last and third last dimension.
        scales: the scales before they are corrected.
        of_tensor: the scale of the tensor.
        format: the format.
        seed: the seed of the rounding of scales.
    """
    stored, inverse, _ = scales
    scaled, some = blocks * inverse, EDEN_GROUP // blocks.shape[-1]
    exact, kept = (
        in_order(in_order((scaled * each).unflatten(-2, (-1, some)), -2), -1)
        for each in (scaled, round_elements(scaled, format, None, 0))
    )
    factor = torch.where(kept == 0, 1.0, exact / kept).repeat_interleave(some, -1)
    wanted = stored.float() * factor[..., None]
    index = torch.arange(wanted.numel(), device=wanted.device, dtype=torch.int64).view(wanted.shape)
    drawn = round_elements(wanted, Format("float8_e4m3fn", rounding="stochastic"), index, seed)
    return drawn.to(stored.dtype), inverse, drawn * of_tensor


def in_order(numbers: torch.Tensor, dim: int) -> torch.Tensor:
    """Add numbers along a dimension, from the first to the last: a sum of torch adds them in another order."""
    return functools.reduce(torch.add, numbers.unbind(dim))


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """Return fp32 powers of two by their biased exponents; 0 stands for the subnormal number 2**-127."""
    return torch.where(exponent == 0, 1 << 22, exponent << 23).to(torch.int32).view(torch.float32)


def random_bits(index: torch.Tensor, seed: int) -> torch.Tensor:
    """Return 24 random bits for every index: a hash of it and the seed."""
    h = (index * 0x9E3779B1 + seed) & 0xFFFFFFFF  # products wrap, and their low bits are right
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return (h ^ (h >> 16)) >> 8


def round_elements(scaled: torch.Tensor, format: Format, index: torch.Tensor | None, seed: int) -> torch.Tensor:
    """Round scaled fp32 numbers to numbers of the element format, each exactly once.

    Args:
        scaled: the numbers, contiguous.
        format: the format.
        index: for stochastic rounding, the place of each number in its tensor, as int64.
        seed: the seed of stochastic rounding.
    """
    element = format.numbers
    magnitude = scaled.abs()
    held = magnitude.clamp(max=element.greatest) if format.saturate else magnitude.clamp(max=2.0 * element.greatest)
    lowest = (element.least_exponent + 127) << 23
    exponent = (bits(held) & _INF).clamp(min=lowest) - (element.mantissa << 23)
    spacing = exponent.view(torch.float32)
    steps = held / spacing  # exact: the spacing is a power of two
    if format.rounding == "even":
        steps = steps.round()
    else:
        whole = steps.floor()
        rest = steps - whole
        steps = whole + (rest >= 0.5 if index is None else (rest * 2**24).to(torch.int64) > random_bits(index, seed))
    rounded = steps * spacing
    if not format.saturate:
        assert element.overflow is not None
        rounded = torch.where(rounded > element.greatest, element.overflow, rounded)
    # A NaN stays as it was: a block of NaN keeps them all.
    rounded = torch.where(magnitude.isnan(), scaled, rounded.copysign(scaled))
    return rounded + 0.0 if element.dtype is torch.int8 else rounded  # it has no -0
