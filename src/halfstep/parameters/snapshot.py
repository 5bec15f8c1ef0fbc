"""Snapshots of tensors, which find later writes in any form."""

from __future__ import annotations

import torch

from ..kernels.shards import local

__all__ = ["Snapshot", "bits"]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """View a 16- or 32-bit float tensor as integers, so that comparison treats -0 and 0 as different, and equal NaNs
    as equal.
    """
    return tensor.view(torch.int16 if tensor.itemsize == 2 else torch.int32)


class Snapshot:
    """The version, and optionally the values, of a tensor at one moment.

    The version counts in-place writes by torch, except writes through ``.data`` and by torch's fused and foreach steps.
    A comparison of values finds every write, but waits for the device unless it is a CPU.

    Args:
        tensor: the tensor; for a sharded tensor, values are compared for the local shard.
        by_value: False to keep the version only.

    Attributes:
        tensor: as given.
        values: a copy of the values; None if ``by_value`` is False.
    """

    def __init__(self, tensor: torch.Tensor, *, by_value: bool = True) -> None:
        self.tensor, self._version = tensor, tensor._version
        self.values = local(tensor.detach()).clone() if by_value else None

    @property
    def versioned(self) -> bool:
        """True if torch counted a write."""
        return self.tensor._version != self._version

    @property
    def written(self) -> bool:
        """True if torch counted a write, or if the values differ."""
        return self.versioned or self.changed

    @property
    def changed(self) -> bool:
        """True if the values differ; without values, True if torch counted a write."""
        if self.values is None:
            return self.versioned
        return not torch.equal(bits(local(self.tensor.detach())), bits(self.values))
