"""8-bit storage of moments: codes of a dynamic map, with the largest magnitude of each block of 256 elements.

The scheme follows Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861), as implemented in
bitsandbytes. Values are divided by the largest magnitude of their block (``absmax``) and rounded to the nearest of the
256 numbers of a map. The map has seven decades, from 1e-7 to 1, each with twice as many numbers as the decade below.

Two things differ. A nonzero second moment is never rounded to 0, because the step is divided by its root: this is the
zero point problem of Li et al., "Memory Efficient Optimizers with 4-bit States" (arXiv 2309.01507). And code 0 of a
signed map, which has no -1, is read as -1 if ``widened`` can prove that the value was -1.

The arithmetic on tensors is here. The ``compiled`` and ``triton`` backends print the same steps, for the same bits.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from .storage import Storage

__all__ = [
    "BLOCK",
    "OFFSET",
    "PER_WIDTH",
    "SIGNED",
    "TINY",
    "UNSIGNED",
    "Grid",
    "blocks_of",
    "dequantize",
    "dynamic_map",
    "grid",
    "quantize",
    "widened",
]

BLOCK = 256
"""The number of elements that share one ``absmax``. A block is a run of elements in the order of memory."""

SIGNED = Storage("blockwise", (torch.uint8, torch.float32, torch.float32), signed=True)
UNSIGNED = Storage("blockwise", (torch.uint8, torch.float32, torch.float32))
"""The storage of values without a sign: codes, ``absmax`` and the map, which all rows of a table share."""

_CPU = torch.device("cpu")
_DECADES = 7
OFFSET, PER_WIDTH = torch.tensor([0.1, 1 / 0.9], dtype=torch.float32, device="cpu").tolist()
"""The start of a decade, and the factor that scales its length to 1; both are float32 numbers."""

TINY = 2.0**-126
"""The smallest ``absmax`` used as a divisor: the inverse of a smaller one is infinite."""


class Grid(NamedTuple):
    """The rule that maps magnitudes between 0 and 1 to places in a map, without a search through the map.

    The numbers of a decade are evenly spaced, so a place in it is a product. All attributes are float32 numbers.

    Attributes:
        decades: for each decade, the lowest magnitude, the power of ten that scales its upper end to 1, and the count
            of its numbers. The first decade begins at 0.
        zero: the lowest magnitude that does not round to 0.
        top: the highest magnitude that does not round to 1.
    """

    decades: tuple[tuple[float, float, float], ...]
    zero: float
    top: float


@functools.cache
def dynamic_map(storage: Storage, device: torch.device = _CPU) -> torch.Tensor:
    """Return the 256 float32 numbers that codes represent, ascending, with or without negative numbers.

    The bits equal ``create_dynamic_map`` of bitsandbytes. The largest number is 1; only the signed map has numbers
    below 0, the lowest of which is -0.993.
    """
    signed = storage.signed
    numbers = [0.0, 1.0]
    for decade in range(_DECADES):
        with torch.device("cpu"):
            ends = torch.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1, dtype=torch.float32, device="cpu")
        numbers += ((ends[:-1] + ends[1:]) / 2.0 * 10.0 ** (decade + 1 - _DECADES)).tolist()
    if signed:
        numbers += [-number for number in numbers if 0.0 < number < 1.0]
    return torch.tensor(sorted(numbers), dtype=torch.float32, device=device)


@functools.cache
def grid(storage: Storage) -> Grid:
    """Return the rule for the map of a storage."""
    numbers = dynamic_map(storage)
    between = ((numbers[1:] + numbers[:-1]) / 2).tolist()
    zero = numbers.tolist().index(0.0)
    first = 1 if storage.signed else 2
    decades, place = [], zero
    for decade in range(_DECADES):
        count = first * 2**decade
        decades.append((between[place] if decade else 0.0, 10.0 ** (_DECADES - 1 - decade), float(count)))
        place += count
    return Grid(tuple(decades), between[zero], between[-1])


def blocks_of(elements: int) -> int:
    """Return the number of blocks for a number of elements."""
    return -(-elements // BLOCK)


def quantize(value: torch.Tensor, storage: Storage) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the codes and ``absmax`` of a tensor.

    Args:
        value: a dense float32 tensor; blocks follow the order of memory. A block with NaN or inf has this value as its
            ``absmax``, and reads as all NaN.
        storage: ``SIGNED`` or ``UNSIGNED``.

    Returns:
        Codes (uint8, with the shape and strides of ``value``) and ``absmax`` (float32, shape [blocks]).
    """
    blocks = _in_blocks(value)
    absmax = blocks.abs().amax(1)
    inverse = 1.0 / torch.where(absmax < TINY, TINY, absmax)
    codes = _codes(blocks * inverse[:, None], storage).to(torch.uint8)
    return _laid_out(codes, value).clone(memory_format=torch.preserve_format), absmax


def dequantize(codes: torch.Tensor, absmax: torch.Tensor, storage: Storage) -> torch.Tensor:
    """Return the float32 values of codes, as a step reads them, with the shape and strides of the codes."""
    return dynamic_map(storage, codes.device)[codes.int()] * _spread(absmax, codes)


def widened(codes: torch.Tensor, absmax: torch.Tensor, storage: Storage) -> torch.Tensor:
    """Return float32 values that ``quantize`` maps back to exactly these codes and this ``absmax``.

    The largest magnitude of a block is exact. So in a block without the code of 1 the largest magnitude was negative,
    and code 0, which otherwise represents -0.993, is -1.
    """
    values = dequantize(codes, absmax, storage)
    if storage.signed:
        blocks = _in_blocks(codes, fill=1)
        lowest = _laid_out((blocks == 0) & (blocks != 255).all(1, keepdim=True), codes)
        values = torch.where(lowest, -_spread(absmax, codes), values)
    return values


def _in_blocks(tensor: torch.Tensor, fill: int = 0) -> torch.Tensor:
    """Return the elements of a dense tensor in the order of memory, filled up to the shape [blocks, BLOCK]."""
    count = tensor.numel()
    flat = tensor.as_strided((count,), (1,))
    return torch.nn.functional.pad(flat, (0, blocks_of(count) * BLOCK - count), value=fill).view(-1, BLOCK)


def _laid_out(blocks: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """View blocks with the shape and strides of a tensor."""
    return blocks.flatten()[: like.numel()].as_strided(like.shape, like.stride())


def _spread(absmax: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Expand ``absmax`` to one value per code, in the layout of the codes."""
    return _laid_out(absmax.repeat_interleave(BLOCK, output_size=len(absmax) * BLOCK), codes)


def _codes(scaled: torch.Tensor, storage: Storage) -> torch.Tensor:
    """Compute the codes of numbers between -1 and 1, as float32. The backends use the same steps in the same order."""
    rule = grid(storage)
    size = scaled.abs()
    power, width = (torch.full_like(size, number) for number in rule.decades[0][1:])
    for lowest, its_power, its_width in rule.decades[1:]:
        above = size >= lowest
        power, width = torch.where(above, its_power, power), torch.where(above, its_width, width)
    place = ((size * power - OFFSET) * PER_WIDTH + 1.0) * width
    last = width + width - 1.0
    place = torch.where(place < last, place, last).trunc()
    place = torch.where(size > rule.top, 2.0 * rule.decades[-1][2], place)
    if not storage.signed:  # the first decade has the places 2 and 3; 1 is for 0 alone
        return torch.where(size == 0, 1.0, torch.where(place < 2.0, 2.0, place)) - 1.0
    place = torch.where(size < rule.zero, 0.0, place)
    return torch.where(scaled < 0, 127.0 - torch.where(place < 127.0, place, 127.0), 127.0 + place)
