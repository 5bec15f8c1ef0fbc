"""What all of these operations take: lists of tensors, a flag, and numbers for single rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...core.errors import ArgumentTypeError, ArgumentValueError
from ...kernels import multi_tensor as ops
from ...kernels.expr import Pass

__all__ = [
    "Flag",
    "Lists",
    "Number",
    "corrections",
    "row_by_row",
    "skip_of",
    "take",
    "unscale",
]


Lists = Sequence[Sequence[torch.Tensor]]
Number = float | torch.Tensor


class Flag:
    """A ``found_inf`` for the block, brought into Apex's integer flag when it ends."""

    def __init__(self, noop_flag: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        self._flag = noop_flag
        self._found = torch.zeros((), device=tensors[0].device if tensors else noop_flag.device)

    def __enter__(self) -> torch.Tensor:
        return self._found

    def __exit__(self, *exc: object) -> None:
        self._flag.copy_(torch.maximum(self._flag, self._found.to(self._flag).expand_as(self._flag)))


def take(lists: Lists, *counts: int) -> list[list[torch.Tensor]]:
    """The lists of an operation that takes so many of them, of one length."""
    if len(lists) not in counts:
        wanted = " or ".join(map(str, counts))
        raise ArgumentTypeError(f"This operation takes {wanted} lists of tensors, not {len(lists)}.")
    if len({len(tensors) for tensors in lists}) > 1:
        raise ArgumentValueError(f"The lists are of different lengths: {', '.join(str(len(t)) for t in lists)}.")
    return [list(tensors) for tensors in lists]


def skip_of(flag: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A flag of Apex as the kernels read it, where the tensors are."""
    return flag.to(tensors[0].device if tensors else flag.device, torch.float32).reshape(())


def corrections(beta1: float, beta2: float, step: Number, corrected: int) -> tuple[Number, Number]:
    """What the first moment, and the root of the second, are to be multiplied by."""
    if not corrected:
        return 1.0, 1.0
    t = torch.as_tensor(step, dtype=torch.float64).reshape(())
    return (1.0 - beta1**t).reciprocal(), (1.0 - beta2**t).rsqrt()


def unscale(flag: torch.Tensor, grads: list[torch.Tensor], inv_scale: Number) -> None:
    """Multiply gradients by a factor in place, unless the flag is set."""
    factor = inv_scale.reshape(()) if isinstance(inv_scale, torch.Tensor) else inv_scale
    ops.run(ops.SCALE, {"factor": factor}, None, skip=skip_of(flag, grads), source=grads, target=grads)


def row_by_row(
    pass_: Pass,
    scalars: dict[str, Any],
    numbers: dict[str, torch.Tensor],
    skip: torch.Tensor | None,
    **columns: list[torch.Tensor],
) -> None:
    """A pass with numbers of shape [rows], row by row of the lists."""
    for i in range(len(next(iter(columns.values())))):
        row = {name: [tensors[i]] for name, tensors in columns.items()}
        ops.run(pass_, {**scalars, **{name: value[i] for name, value in numbers.items()}}, None, skip=skip, **row)
