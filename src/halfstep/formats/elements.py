"""The numbers of each element format: bits, exponents, the greatest one, and the value of every code."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

__all__ = ["ELEMENTS", "Element", "values"]


@dataclass(frozen=True)
class Element:
    """Numbers with a sign, a few fraction bits, and exponents between two bounds.

    Int8 is one of them: with one exponent its numbers are all the multiples of ``2**-mantissa``.

    Attributes:
        mantissa: the number of fraction bits.
        least_exponent: the exponent of the smallest normal numbers; subnormal numbers have their spacing.
        greatest_exponent: the exponent of the greatest number.
        greatest: the greatest finite number.
        bits: the size of a code.
        dtype: the dtype of codes: torch's own if it has one, otherwise one code per byte.
        overflow: the replacement of a number that is too great in a format that does not saturate; ``None`` if the
            element has neither inf nor NaN.
    """

    mantissa: int
    least_exponent: int
    greatest_exponent: int
    greatest: float
    bits: int
    dtype: torch.dtype = torch.uint8
    overflow: float | None = None


ELEMENTS = {
    "float8_e4m3fn": Element(3, -6, 8, 448.0, 8, torch.float8_e4m3fn, float("nan")),
    "float8_e5m2": Element(2, -14, 15, 57344.0, 8, torch.float8_e5m2, float("inf")),
    "e2m3": Element(3, 0, 2, 7.5, 6),
    "e3m2": Element(2, -2, 4, 28.0, 6),
    "e2m1": Element(1, 0, 2, 6.0, 4),
    "int8": Element(6, 0, 0, 127 / 64, 8, torch.int8),
}
"""Each element format by its name. Int8 counts in steps of 1/64, as OCP's MXINT8 does, and has no use for -128."""


@functools.cache
def values(name: str) -> torch.Tensor:
    """Return the value of every code of an element format, in fp32; a code, as unsigned bits, is an index."""
    element = ELEMENTS[name]
    codes = torch.arange(2**element.bits, device="cpu", dtype=torch.int64)
    if element.dtype is not torch.uint8:
        numbers = codes.to(torch.uint8).view(element.dtype).float()
        return numbers / 64 if name == "int8" else numbers
    sign, magnitude = codes >> (element.bits - 1), codes & (2 ** (element.bits - 1) - 1)
    exponent, fraction = magnitude >> element.mantissa, magnitude & (2**element.mantissa - 1)
    whole = fraction + (exponent > 0) * 2**element.mantissa
    numbers = torch.ldexp(whole.float(), exponent.clamp(min=1) - 1 + element.least_exponent - element.mantissa)
    return torch.where(sign == 1, -numbers, numbers)
