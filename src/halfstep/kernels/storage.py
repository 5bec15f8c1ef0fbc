"""The storage of a column's values: one tensor, a 16-bit weight with its remainder, a weight with a master, or 8-bit
codes.

The bit arithmetic of these forms on tensors is here, and for 8-bit codes in ``blockwise``. The ``compiled`` and
``triton`` backends print the same steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

__all__ = [
    "SPLIT",
    "Storage",
    "after_writes",
    "dense",
    "join",
    "plain",
    "round_half_away",
    "round_stochastic",
    "split",
    "split_of",
    "stochastic",
]

_EXPONENT = 0x7F80_0000
_MAX_BF16 = 0x7F7F
_ODD = -0x61C88647  # 2**32 over the golden ratio, as an int32: consecutive elements get far-apart inputs to the mixer


@dataclass(frozen=True)
class Storage:
    """The storage form of a column.

    Attributes:
        kind: ``dense`` is one tensor; ``split`` a bfloat16 weight and the int16 remainder of its fp32 value;
                ``plain`` an fp32 master and a 16-bit weight, which is the value if it is not the rounded master;
                ``stochastic`` a bfloat16 tensor that is rounded stochastically when written;
                ``blockwise`` 8-bit codes, the largest magnitude of each block, and the map into which codes index.
            dtypes: the dtypes of its tensors.
            signed: True if a blockwise column has negative values.
    """

    kind: Literal["dense", "split", "plain", "stochastic", "blockwise"]
    dtypes: tuple[torch.dtype, ...]
    signed: bool = False

    @property
    def elementwise(self) -> int:
        """The number of its leading tensors with one element per value."""
        return 1 if self.kind == "blockwise" else len(self.dtypes)


SPLIT = Storage("split", (torch.bfloat16, torch.int16))


def dense(dtype: torch.dtype) -> Storage:
    """Make the form of one tensor, rounded to nearest even when written."""
    return Storage("dense", (dtype,))


def plain(dtype: torch.dtype) -> Storage:
    """Make the form of an fp32 master and a weight of ``dtype``; user writes to the weight count (``after_writes``)."""
    return Storage("plain", (torch.float32, dtype))


def stochastic(dtype: torch.dtype) -> Storage:
    """Make the form of one bfloat16 tensor, rounded stochastically when written."""
    return Storage("stochastic", (dtype,))


def split(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split an fp32 tensor into bfloat16, rounded half away from zero, and the int16 that restores the fp32 value.

    ``join(*split(x))`` equals ``x`` bit for bit for every number, infinity and quiet NaN; a signalling NaN becomes
    quiet. Rounding half to even would not work: at a tie the low bits are 0x8000 in both directions. A number above the
    largest bfloat16 rounds to infinity, by IEEE 754, and is still restored.
    """
    bits = value.view(torch.int32)
    nan = (bits & 0x7FFF_FFFF) > _EXPONENT
    # Addition would carry a NaN of large payload into the sign: it is truncated, with the quiet bit set.
    high = torch.where(nan, (bits >> 16) | 0x40, (bits >> 16) + ((bits >> 15) & 1))
    return _low16(high).view(torch.bfloat16), _low16(bits)


def join(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Join a bfloat16 weight and its remainder to the fp32 value.

    After user code wrote to the weight, the remainder belongs to another value. The result is then within half a
    bfloat16 ulp of the weight; for zero or infinity, for which such a remainder would make a NaN, it is the weight.
    """
    high = weight.view(torch.int16).to(torch.int32)
    low = remainder.to(torch.int32)
    magnitude = high & 0x7FFF
    foreign = ((magnitude == 0) & (low < 0)) | ((magnitude == 0x7F80) & (low > 0))
    low = torch.where(magnitude > 0x7F80, low & 0xFFFF, torch.where(foreign, 0, low))
    return ((high << 16) + low).view(torch.float32)


def after_writes(master: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the fp32 value of a 16-bit weight with a plain master: the master, or the weight if user code wrote to it.

    The master counts if it rounds to the weight, including to a zero of the other sign, to infinity, and NaN to NaN.
    """
    return torch.where(_equal(master.to(weight.dtype), weight), master, weight)


def split_of(master: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split a plain master, or the bfloat16 weight if no rounding of the master gives it."""
    return split(torch.where(_equal(round_half_away(master), weight), master, after_writes(master, weight)))


def _equal(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a == b) | (a.isnan() & b.isnan())  # torch 2.11 knows no a != a of a DTensor


def round_half_away(value: torch.Tensor) -> torch.Tensor:
    """Round an fp32 tensor to bfloat16, ties away from zero: the weight that ``split`` returns."""
    return split(value)[0]


def round_stochastic(value: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    """Round an fp32 tensor to bfloat16, up with a probability equal to the relative distance from the lower neighbor.

    Args:
        value: a dense float32 tensor; elements are numbered in the order of memory.
        seed: a 0-dim int32 tensor. The same seed gives the same bits on every backend and device.
    """
    flat = value.as_strided((value.numel(),), (1,)).view(torch.int32)
    noise = _mix(torch.arange(value.numel(), dtype=torch.int32, device=value.device) * _ODD + seed)
    bits = flat + (noise & 0xFFFF)
    finite = (flat & _EXPONENT) != _EXPONENT
    high = bits >> 16
    overflow = finite & ((bits & _EXPONENT) == _EXPONENT)
    high = torch.where(overflow, (flat >> 16 & 0x8000) | _MAX_BF16, high)
    nan = (flat & 0x7FFF_FFFF) > _EXPONENT
    high = torch.where(finite, high, torch.where(nan, (flat >> 16) | 0x40, flat >> 16))
    return _low16(high).view(torch.bfloat16).as_strided(value.shape, value.stride())


def _mix(h: torch.Tensor) -> torch.Tensor:
    """Apply the finalizer of MurmurHash3 (A. Appleby, public domain) to int32: every bit affects every output bit."""
    h = (h ^ _shift(h, 16)) * -0x7A143595
    h = (h ^ _shift(h, 13)) * -0x3D4D51CB
    return h ^ _shift(h, 16)


def _shift(h: torch.Tensor, n: int) -> torch.Tensor:
    """Shift int32 right logically."""
    return (h >> n) & ((1 << (32 - n)) - 1)


def _low16(bits: torch.Tensor) -> torch.Tensor:
    """Return the low 16 bits of int32 as int16, without an out-of-range conversion."""
    low = bits & 0xFFFF
    return torch.where(low > 0x7FFF, low - 0x1_0000, low).to(torch.int16)
