"""``measuring``: a block whose passes note what rounding loses; outside of such blocks a training measures nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .format import Format
from .quantize import _WITHIN, _blocked, _scales

__all__ = ["is_measuring", "losses_of", "measuring"]

_blocks: list[object] = []  # the blocks that are open, of all threads: autograd has threads of its own


@contextmanager
def measuring() -> Iterator[None]:
    """Measure, within the block, what layers with a recipe lose by rounding, for ``halfstep.check``.

    ::

        with halfstep.formats.measuring():
            loss_fn(model(x), y).backward()
        print(halfstep.check(model))

    Results, gradients and random state are the same as without the block; the passes take longer. Forward passes give
    the numbers of inputs and weights, backward passes of gradients. ``halfstep.check(model, batch=)`` and the steps
    that a ``Monitor`` samples open such a block themselves. Compiled code is measured only where it runs eagerly, as it
    does for both of these.
    """
    block = object()
    _blocks.append(block)
    try:
        yield
    finally:
        _blocks.remove(block)


def is_measuring() -> bool:
    """True inside of a block."""
    return bool(_blocks)


def losses_of(exact: Tensor, rounded: Tensor, format: Format, dim: int, amax: Tensor | None) -> Tensor:
    """Compute the share of numbers that saturate, and the share of blocks that lose more than half of their numbers.

    Args:
        exact: the numbers before they were rounded.
        rounded: the numbers afterwards.
        format: their format.
        dim: the dimension along which blocks lie.
        amax: the largest value that a delayed scale allows for; None for scales of these numbers.
    """
    exact, found = (_blocked(each, format, dim).float() for each in (exact, rounded))
    element = format.numbers
    scaled = (exact * _scales(exact, format, amax)[1]).abs()
    beyond = scaled > element.greatest + 2.0 ** (element.greatest_exponent - element.mantissa - 1)
    there, gone = ((exact != 0) & kept for kept in (torch.ones_like(beyond), found == 0))
    flushed = gone.sum(_WITHIN) > there.sum(_WITHIN) / 2
    return torch.stack([beyond.float().mean(), flushed.float().mean()])
