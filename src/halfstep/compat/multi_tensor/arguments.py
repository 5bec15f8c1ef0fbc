"""Checks of the arguments that all operations share: lists of tensors, a flag, and numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...core.errors import ArgumentTypeError, ArgumentValueError
from ...core.scalars import scalar_dtype
from ...kernels import multi_tensor as ops
from ...kernels.tensor_table import Number

__all__ = ["Flag", "Lists", "Number", "as_float64", "skip_of", "take", "unscale"]

Lists = Sequence[Sequence[torch.Tensor]]


class Flag:
    """A block with a ``found_inf`` that its end writes to Apex's integer flag."""

    def __init__(self, noop_flag: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        self._flag = noop_flag
        self._found = torch.zeros((), dtype=torch.float32, device=tensors[0].device if tensors else noop_flag.device)

    def __enter__(self) -> torch.Tensor:
        return self._found

    def __exit__(self, *exc: object) -> None:
        self._flag.copy_(torch.maximum(self._flag, self._found.to(self._flag).expand_as(self._flag)))


def take(lists: Lists, *counts: int) -> list[list[torch.Tensor]]:
    """Check the count and the lengths of an operation's lists, and return them."""
    if len(lists) not in counts:
        wanted = " or ".join(map(str, counts))
        raise ArgumentTypeError(f"This operation takes {wanted} lists of tensors, not {len(lists)}.")
    if len({len(tensors) for tensors in lists}) > 1:
        raise ArgumentValueError(f"The lists are of different lengths: {', '.join(str(len(t)) for t in lists)}.")
    return [list(tensors) for tensors in lists]


def skip_of(flag: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Convert Apex's flag to a flag for the kernels, on the device of the tensors."""
    return flag.to(tensors[0].device if tensors else flag.device, torch.float32).reshape(())


def as_float64(number: Number) -> torch.Tensor:
    """Convert a number or a tensor of one element to a 0-dim float64 tensor."""
    device = getattr(number, "device", torch.device("cpu"))
    return torch.as_tensor(number, dtype=scalar_dtype(device), device=device).reshape(())


def unscale(flag: torch.Tensor, grads: list[torch.Tensor], inv_scale: Number) -> None:
    """Multiply gradients by a factor in place, unless the flag is set."""
    factor = inv_scale.reshape(()) if isinstance(inv_scale, torch.Tensor) else inv_scale
    ops.run(ops.scale_kernel, {"factor": factor}, skip=skip_of(flag, grads), source=grads, target=grads)
