"""Samples of tensors.

A sample is made of strided slices, so it costs no random numbers and no copy of a whole tensor.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from ...kernels.shards import ORDINARY, is_sharded, local
from ...torch_internals.torch_compat import is_fake, is_functorch_wrapped_tensor, is_traceable_wrapper_subclass

__all__ = [
    "MOST_TENSORS",
    "PROOF",
    "Drawn",
    "can_sample",
    "column",
    "draw",
    "element_shares",
    "grid_flags",
    "is_on_grid",
    "sample",
    "samples_in",
]

MOST_TENSORS = 128
"""The number of tensors that are sampled."""

PROOF = 64
"""The least number of values on the grid of a 16-bit format that proves a rounding."""

_ELEMENTS = 2**16
"""The number of elements that are sampled in total, so that a share has a standard deviation of at most 0.002."""


class Drawn(NamedTuple):
    """A tensor to sample.

    Attributes:
        tensor: the tensor.
        share: the tensor's share of all elements.
        elements: the maximum number of its elements to sample.
    """

    tensor: torch.Tensor
    share: float
    elements: int


def draw(tensors: Sequence[torch.Tensor]) -> list[Drawn]:
    """Choose the tensors to sample: all, or 128 of many, drawn with probability in proportion to their size."""
    sizes = [t.numel() for t in tensors]
    total = sum(sizes)
    shares: dict[int, float] = {}
    if not total:
        return []
    if len(tensors) <= MOST_TENSORS:
        shares = {i: size / total for i, size in enumerate(sizes) if size}
    else:
        index, end = 0, sizes[0]
        for i in range(MOST_TENSORS):
            while end <= (i + 0.5) * total / MOST_TENSORS:
                index += 1
                end += sizes[index]
            shares[index] = shares.get(index, 0.0) + 1 / MOST_TENSORS
    return [Drawn(tensors[i], share, math.ceil(share * _ELEMENTS)) for i, share in shares.items()]


def can_sample(tensor: torch.Tensor) -> bool:
    """True if a tensor has a value in memory for each element.

    Sparse, nested and quantized tensors, tensors without storage, packed tensors of other libraries and tensors within
    a transform of ``torch.func`` do not.
    """
    if type(tensor) in ORDINARY:
        missing = tensor.is_meta or tensor.is_nested or tensor.is_quantized or is_functorch_wrapped_tensor(tensor)
        return tensor.layout is torch.strided and not missing
    return not is_fake(tensor) and (is_sharded(tensor) or not is_traceable_wrapper_subclass(tensor))


def sample(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Take at most ``count`` evenly spread elements; the odd stride keeps them from one column of a matrix."""
    here = tensor if type(tensor) in ORDINARY else local(tensor)
    if here.requires_grad and torch.is_grad_enabled():
        here = here.detach()
    size = here.numel()
    stride = _stride(size, count)
    if here.is_contiguous():  # one view is three times faster than three
        return torch.as_strided(here, (-(-size // stride),), (stride,))
    return here.reshape(-1) if stride == 1 else here[_places(here.shape, stride, here.device)]


@functools.lru_cache(64)  # every sampled step needs the same indices
def _places(shape: Sequence[int], stride: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return the indices of every ``stride``-th element of a tensor that flattening would copy as a whole."""
    index = torch.arange(0, math.prod(shape), stride, dtype=torch.int64, device=device)
    found = []
    for length in reversed(shape):
        found.append(index % length)
        index = index // length
    return tuple(reversed(found))


def samples_in(tensor: torch.Tensor, count: int) -> int:
    """Return the number of elements that ``sample`` takes."""
    size = local(tensor).numel()
    return -(-size // _stride(size, count))


def _stride(size: int, count: int) -> int:
    return 1 if size <= count else -(-size // count) | 1


def column(tensors: Iterable[torch.Tensor], counts: Iterable[int]) -> torch.Tensor:
    """Concatenate the samples of several tensors."""
    return torch.cat(list(map(sample, tensors, counts)))


def element_shares(shares: Iterable[float], lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """Compute the share of all elements that each element of a ``column`` represents.

    Args:
        shares: the share of each tensor.
        lengths: the number of samples of each tensor.
        device: the device of the result.
    """
    parts = map(lambda s, n: torch.full((n,), s / (n or 1), dtype=torch.float32, device="cpu"), shares, lengths)
    return torch.cat(list(parts)).to(device, non_blocking=True)


def grid_flags(values: torch.Tensor) -> torch.Tensor:
    """Compute two flags along the last dimension that tell if all fp32 values lie on the grid of a 16-bit format.

    The first is 1.0 if a value is off the grid of float16's 10 fraction bits, which contains bfloat16's 7. The second
    is 1.0 if a value needs more than 4 of these bits: small whole numbers, masks and constants do not, and prove
    nothing. Inf and NaN, with their special bits, prove nothing either.
    """
    bits = values.contiguous().view(torch.int32)
    bits = bits.masked_fill((bits & 0x7F800000) == 0x7F800000, 0)
    off, used = (bits & 0x1FFF) != 0, (bits & 0x7FFFF) != 0
    return torch.stack([off.any(-1), used.any(-1)], -1).float()


def is_on_grid(flags: Sequence[float]) -> bool:
    """True if ``grid_flags`` prove that values were rounded to 16 bits."""
    off, used = flags
    return not off and bool(used)
