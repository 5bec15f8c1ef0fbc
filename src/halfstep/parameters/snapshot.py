"""A tensor as it was at a moment, so that a later write to it is found, however it was written."""

from __future__ import annotations

import torch

from ..kernels.shards import local

__all__ = ["Snapshot", "bits"]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a float tensor of 16 or 32 bits as integers: they tell -0 from 0, and a NaN from no other."""
    return tensor.view(torch.int16 if tensor.itemsize == 2 else torch.int32)


class Snapshot:
    """A tensor as it was when this was made.

    Its version tells what torch has written to it, but a write through ``.data`` changes none, nor do the fused and
    foreach steps of torch. Values tell it always. On another device than a CPU a look at them waits for the device.

    Args:
        tensor: the tensor; of a sharded one the part that lies here.
        by_value: False to keep the version only.

    Attributes:
        tensor: as given.
        values: a copy of the values; None without.
    """

    def __init__(self, tensor: torch.Tensor, *, by_value: bool = True) -> None:
        self.tensor, self._version = tensor, tensor._version
        self.values = local(tensor.detach()).clone() if by_value else None

    @property
    def versioned(self) -> bool:
        """True if torch has counted a write."""
        return self.tensor._version != self._version

    @property
    def written(self) -> bool:
        """True if torch has counted a write, or the values are others now."""
        return self.versioned or self.changed

    @property
    def changed(self) -> bool:
        """True if the values are others now; without values, if a write was counted."""
        if self.values is None:
            return self.versioned
        return not torch.equal(bits(local(self.tensor.detach())), bits(self.values))
