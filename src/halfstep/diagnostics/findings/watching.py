"""``watch``: counts, on the device, the weights that a step leaves unchanged although they have a gradient."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...core.checks import check_count, check_kind
from ...core.inner_optimizers import params_of, unwrap
from ...parameters.async_reader import AsyncReader, capturing
from ...parameters.ledger import get_grads
from ...stepping.attached import attached_to
from ..observe.samples import Drawn, can_sample, draw, element_shares, sample
from ..observe.updates import Change, before_step
from ..observe.watch import Hook
from .checking import finding
from .finding import Finding, grouped, log
from .rules_of_optimizer import lost

__all__ = ["Watch", "watch"]


def watch(optimizer: Any, every: int = 100) -> Watch:
    """Count the updates that change nothing, at every ``every``-th step of an optimizer.

    ::

        watch = halfstep.watch(optimizer, every=100)
        train()
        print(watch.fraction, watch.findings())
        watch.remove()

    The device compares a sample of the weights before and after the step, or of their masters if there are any. Weights
    without a gradient and steps skipped by an overflow do not count. The watch reads the result some steps later, so
    that no step waits. It does not see steps within a backward pass (``attach(model, release=True)``) and replays of
    CUDA graphs. Lost updates are logged to "halfstep" as HS101, and again only when they get worse.

    Args:
        optimizer: any ``torch.optim.Optimizer``, attached by ``amp`` or not.
        every: the number of steps from one measured step to the next. Other steps cost a comparison of two integers.

    Returns:
        A handle, whose ``remove()`` ends the watch.

    Raises:
        ArgumentTypeError: if ``optimizer`` is not an optimizer.
        ArgumentValueError: for ``every`` below 1.
    """
    inner = unwrap(optimizer)
    check_kind("optimizer", inner, torch.optim.Optimizer, "a torch.optim.Optimizer")
    check_count("every", every)
    return Watch(inner, every)


class Watch:
    """The count of lost updates, which ``watch`` returns.

    Attributes:
        fraction: the share of lost updates at the latest step whose numbers have arrived; None before.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, every: int) -> None:
        self.fraction: float | None = None
        self._optimizer = weakref.ref(optimizer)
        self._every = every
        self._steps = 0
        self._before: Callable[[], list[torch.Tensor]] | None = None
        self._late = AsyncReader(2)
        self._worst: Finding | None = None
        self._hooks = [
            optimizer.register_step_pre_hook(Hook(self._begin)),
            optimizer.register_step_post_hook(Hook(self._end)),
        ]

    def __repr__(self) -> str:
        return (
            f"Watch({type(self._optimizer()).__name__}, every={self._every}, steps={self._steps}, lost={self.fraction})"
        )

    def remove(self) -> None:
        """Stop watching; the measurements stay."""
        for hook in self._hooks:
            hook.remove()
        self._before = None

    def findings(self) -> list[Finding]:
        """Return the worst HS101 so far, or an empty list. Waits for outstanding work of the device."""
        self._poll(wait=True)
        return [] if self._worst is None else [self._worst]

    @torch.no_grad()
    def _begin(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._steps += 1
        if self._steps % self._every:
            return
        self._poll(wait=False)
        params = [p for p in params_of(optimizer) if p.is_floating_point() and can_sample(p)]
        params = [p for p, grad in zip(params, get_grads(params), strict=True) if grad is not None and can_sample(grad)]
        if params and not capturing(params[0].device):
            self._before = _losses(optimizer, draw(params))

    @torch.no_grad()
    def _end(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        before, self._before = self._before, None
        counts = [] if before is None else before()
        if counts:
            home = counts[0].device
            total = torch.stack([each.to(home, non_blocking=True) for each in counts]).sum(0)
            self._late.post(*(total * (1.0 - _skipped(optimizer, home))).unbind())

    def _poll(self, *, wait: bool) -> None:
        for lost_share, moving in self._late.poll(wait=wait):
            if moving:
                self._report(lost_share / moving)

    def _report(self, fraction: float) -> None:
        self.fraction = fraction
        optimizer = self._optimizer()
        params = [] if optimizer is None else params_of(optimizer)
        name = type(optimizer).__name__
        where = grouped({f"{name}.{i}": p.numel() for i, p in enumerate(params)})
        found = lost(where, fraction, f", as measured around a step of {name}", every=self._every)
        worst = self._worst
        if found is None or (worst is not None and fraction <= worst.evidence["lost"]):
            return
        self._worst = finding("HS101", found)
        if worst is None or worst.severity != found.severity:
            log([self._worst], by="halfstep.watch")


def _losses(optimizer: torch.optim.Optimizer, drawn: Sequence[Drawn]) -> Callable[[], list[torch.Tensor]]:
    """Sample parameters before a step, and the places at which their gradients are not 0.

    Returns:
        A function to call after the step. It returns, per device, the shares of all parameters that were lost and that
        have a gradient.
    """
    params, shares, elements = zip(*drawn, strict=True)
    grads = [grad for grad in get_grads(params) if grad is not None]
    place = {id(param): i for i, param in enumerate(params)}
    is_moving = [sample(grad, count) != 0 for grad, count in zip(grads, elements, strict=True)]
    changes = before_step(optimizer, params, elements)

    def lost_and_moving(change: Change) -> torch.Tensor:
        places = [place[id(param)] for param in change.params]
        moving = torch.cat([is_moving[i] for i in places])
        each = element_shares([shares[i] for i in places], change.lengths, moving.device)
        lost = moving & (change.before == change.after)
        return torch.stack([each @ lost.float(), each @ moving.float()])

    return lambda: list(map(lost_and_moving, changes()))


def _skipped(optimizer: torch.optim.Optimizer, device: torch.device) -> torch.Tensor:
    """Return 1.0 if an overflow made the step change nothing, else 0.0."""
    flag = getattr(optimizer, "found_inf", None)  # set while the step runs, which includes torch's hooks
    attached = attached_to(optimizer)
    if flag is None and attached is not None:
        flag = attached.was_skipped
    known = torch.as_tensor(0.0 if flag is None else flag, device=getattr(flag, "device", "cpu"))
    return known.to(device, torch.float32, non_blocking=True).reshape(())
