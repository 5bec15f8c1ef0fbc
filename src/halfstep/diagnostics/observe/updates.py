"""The change that a step makes to the values behind parameters: samples from before and after the step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ...kernels.storage import join
from ...stepping.attached import attached_to
from .samples import column, samples_in

__all__ = ["Change", "before_step"]


def _numbers_behind(optimizer: torch.optim.Optimizer, params: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield for each parameter the tensors of its full value: itself (and a split master's remainder) or its master."""
    attached = attached_to(optimizer)
    beside: Any = {}.get if attached is None or attached.window.plain is None else attached.window.table.find
    for param in params:
        state = optimizer.state.get(param) or {}
        master = state.get("master") if (kept := beside(param)) is None else kept.read()
        remainder = [state["remainder"].to(param.device)] if "remainder" in state else []
        yield [param, *remainder] if master is None else [master.to(param.device)]


class Change(NamedTuple):
    """The change that a step made to parameters on one device.

    Attributes:
        params: the parameters.
        lengths: the number of samples of each parameter.
        before: the concatenated samples before the step, in the dtype in which the step computes.
        after: the same elements after the step.
    """

    params: Sequence[torch.Tensor]
    lengths: Sequence[int]
    before: torch.Tensor
    after: torch.Tensor


_Groups = Sequence[tuple[Sequence[tuple[torch.Tensor, int]], torch.Tensor]]


def before_step(
    optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor], counts: Sequence[int]
) -> Callable[[], Iterator[Change]]:
    """Sample the values behind parameters before a step changes them.

    Args:
        optimizer: the optimizer that steps the parameters.
        params: the parameters.
        counts: the maximum number of elements to sample of each parameter.

    Returns:
        A function to call after the step. It yields the changes, without parameters that got their masters in the step.
    """
    groups: dict[tuple[Any, ...], list[tuple[torch.Tensor, int]]] = {}
    for param, count, numbers in zip(params, counts, _numbers_behind(optimizer, params), strict=True):
        groups.setdefault((param.device, *(each.dtype for each in numbers)), []).append((param, count))
    return partial(_changes, optimizer, [(group, _values(optimizer, group)) for group in groups.values()])


def _changes(optimizer: torch.optim.Optimizer, groups: _Groups) -> Iterator[Change]:
    for group, before in groups:
        after = _values(optimizer, group)
        if after.dtype is before.dtype:
            yield Change([p for p, _ in group], [samples_in(p, n) for p, n in group], before, after)


@torch.no_grad()
def _values(optimizer: torch.optim.Optimizer, group: Sequence[tuple[torch.Tensor, int]]) -> torch.Tensor:
    """Concatenate the samples to one tensor, so that one comparison is enough."""
    numbers = zip(*_numbers_behind(optimizer, (param for param, _ in group)), strict=True)
    columns = [column(tensors, [count for _, count in group]) for tensors in numbers]
    return join(*columns) if len(columns) == 2 else columns[0]
