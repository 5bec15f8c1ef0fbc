"""A check of an optimizer's first steps on plain masters: they have to change the masters, not the weights behind."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..core.errors import UsageError
from ..core.inner_optimizers import package_of_step
from ..kernels.shards import locals_of
from ..masters.plain import PlainMasters

__all__ = ["FirstSteps"]

logger = logging.getLogger("halfstep")

_CHECKED = 8  # steps
_IDLE = 3  # steps in a row that change no master, after which this is said


class FirstSteps:
    """The check of one optimizer, if its ``step`` is not torch's. It compares versions.

    Only where no version has changed it reads the device: a write through ``master.data`` changes none, nor do torch's
    fused calls (as of 2.13).

    Args:
        optimizer: before it is attached.

    Attributes:
        left: how many steps are still to be looked at.
    """

    def __init__(self, optimizer: Any) -> None:
        self.left = 0 if package_of_step(optimizer) in ("torch", "halfstep") else _CHECKED
        self._idle = -1  # the first one may have changed no version all the same

    @contextmanager
    def check(self, optimizer: Any, plain: PlainMasters) -> Iterator[None]:
        """Look at the step that is taken within the block.

        Args:
            optimizer: whose step it is.
            plain: its masters, in place.

        Raises:
            UsageError: if the step wrote to a parameter that has a gradient and not to its master.
        """
        pairs = [pair for pair in plain.pairs() if pair[1].grad is not None]
        if not pairs:
            yield
            return
        self.left -= 1
        masters = [master for _, master in pairs]
        versions = [(param._version, master._version) for param, master in pairs]
        bits = None if self._idle < 0 else _bits(masters)
        yield
        idle = True
        for (param, master), (of_param, of_master) in zip(pairs, versions, strict=True):
            if master._version != of_master:
                idle = False
            elif param._version != of_param:
                raise UsageError(
                    f"{type(optimizer).__name__}.step wrote to a 16-bit weight, of shape {tuple(param.shape)}, and not "
                    "to its fp32 master, which is in its param_groups while it steps: it keeps a list of the weights "
                    "of its own, and small updates would be lost. Have it go through self.param_groups, or train at "
                    "O1, where the weights are fp32."
                )
        if not idle:
            self._idle = -1
        elif any(group.get("lr") != 0.0 for group in optimizer.param_groups):
            self._count_idle(optimizer, bits is not None and not torch.equal(bits, _bits(masters)))

    def _count_idle(self, optimizer: Any, written: bool) -> None:
        self._idle += 1
        if written:
            self.left = 0
        elif self._idle == _IDLE:
            self.left = 0
            logger.warning(
                "%d steps of %s had gradients and changed no fp32 master. If it steps weights by a list or a copy of "
                "its own, have it go through self.param_groups, where the masters are while it steps.",
                _IDLE,
                type(optimizer).__name__,
            )


def _bits(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The sum of the bits of each tensor, which tells it from what it is after a step."""
    return torch.stack([t.detach().view(torch.int32).sum().cpu() for t in locals_of(tensors)])
