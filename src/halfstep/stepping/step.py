"""The step of one optimizer: it is taken, skipped on the host, or skips itself on the device. Skips are counted.

A closure that is given to it is evaluated as mixed precision needs it.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from ..casting.scope import OpCasting
from ..core.errors import UsageError
from ..core.inner_optimizers import package_of_step
from ..distributed.ddp_sync import BackwardRecord
from ..gradients.held_masters import WITH_MEMORY, settle
from ..masters.keeper import MasterKeeper
from ..optimizers.base import FusedOptimizer
from .backward import any_overflow

__all__ = ["ClosureOverflowed", "Stepping", "guarded"]

logger = logging.getLogger("halfstep")

_RETRIES = 64  # enough to bring any float32 scale down to its floor by halving, twice over


class Stepping:
    """How one optimizer steps.

    Args:
        optimizer: this must not outlive it.

    Attributes:
        original_step: the step of the class that the optimizer had before it was attached, without torch's hooks; None
            if it was not. Bound to the optimizer, this would keep it alive until the garbage collector runs.
        instance_step: a ``step`` that somebody had put on the instance before; it is taken instead.
        calls: how many steps were taken or skipped.
        hooked: True if torch's hooks run around a step.
        found_inf: for a step that takes flags, 0-dim float32 tensor: if it is not 0, the step changes nothing.
        grad_scale: by what a step that takes flags divides its gradients; None if they are unscaled.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.original_step: Callable[..., Any] | None = None
        self.instance_step: Callable[..., Any] | None = None
        self.hooked = False
        self.calls = 0
        self.found_inf: torch.Tensor | None = None
        self.grad_scale: torch.Tensor | None = None
        # In torch's older contract ``step`` gets the scaler itself; such an optimizer reads no flags.
        self._wants_scaler = "grad_scaler" in inspect.signature(optimizer.step).parameters
        self._is_foreign = package_of_step(optimizer) not in ("torch", "halfstep")
        self._skipped = 0
        self._skipped_on_device: torch.Tensor | None = None
        self._latest: torch.Tensor | bool = False

    @property
    def takes_flags(self) -> bool:
        """Whether the step reads ``optimizer.found_inf`` on the device, by torch's contract for scalers."""
        return bool(getattr(self._optimizer(), "_step_supports_amp_scaling", False)) and not self._wants_scaler

    @property
    def skipped(self) -> int:
        """How many steps were skipped for an overflow. Reads the device."""
        unread = self._skipped_on_device
        return self._skipped + (0 if unread is None else int(unread))

    @property
    def was_skipped(self) -> torch.Tensor:
        """Whether the latest step was skipped, as a 0-dim bool tensor; only looking at its value reads the device."""
        latest = self._latest
        return latest != 0 if isinstance(latest, torch.Tensor) else torch.tensor(latest, dtype=torch.bool, device="cpu")

    def take(self, closure: Callable[[], Any] | None, args: Any, kwargs: Any, keeper: MasterKeeper) -> Any:
        """Take the step, once it is decided that it is not skipped, with masters in their places.

        Args:
            closure: for the step, or None.
            args: further arguments of the step.
            kwargs: further keyword arguments of the step.
            keeper: the masters.

        Returns:
            What the step returns.
        """
        optimizer: Any = self._optimizer()
        found_inf, self.found_inf = self.found_inf, None
        step: Any = self.instance_step
        if step is None:
            step = optimizer.step if self.original_step is None else partial(self.original_step, optimizer)
        self._latest = False
        flag = getattr(optimizer, "found_inf", None) if found_inf is None else found_inf
        torch_sgd = isinstance(optimizer, torch.optim.SGD) and not isinstance(optimizer, FusedOptimizer)
        plain = keeper.plain
        held = plain is not None or closure is not None or bool(WITH_MEMORY)
        with keeper.in_place() if held else nullcontext():
            if flag is not None and torch_sgd and not _start_momentum(optimizer) and flag.item():
                return self.skip()
            scale, self.grad_scale = self.grad_scale, None
            others: dict[str, Any] = {}
            if found_inf is not None:
                # Another scaler, around a block, deletes its own after the step.
                given = getattr(optimizer, "grad_scale", None)
                names = ("grad_scale", "found_inf")
                others = {name: vars(optimizer)[name] for name in names if name in vars(optimizer)}
                optimizer.grad_scale = given if scale is None else scale if given is None else scale * given
                optimizer.found_inf = found_inf
            try:
                returned = step(*args, **kwargs) if closure is None else step(closure, *args, **kwargs)
                if closure is None and plain is not None and self._is_foreign:
                    plain.step_writes.check(optimizer)
            finally:
                if found_inf is not None:
                    del optimizer.grad_scale, optimizer.found_inf
                    vars(optimizer).update(others)
        if WITH_MEMORY and not held:
            settle()  # the step itself has read some
        flag = getattr(optimizer, "found_inf", None) if found_inf is None else found_inf  # a scaler sets it in the step
        if flag is not None:
            self._latest = flag
            if self._skipped_on_device is None:
                self._skipped_on_device = torch.zeros_like(flag)
            self._skipped_on_device.add_(flag)  # in place, so that a captured step goes on counting
        return returned

    def skip(self) -> None:
        """Do not step."""
        self._skipped += 1
        self._latest = True
        self.grad_scale = None

    @contextmanager
    def flags_taken(self) -> Iterator[tuple[torch.Tensor | None, torch.Tensor | None]]:
        """Within the block, ``grad_scale`` and ``found_inf`` of another scaler are off the optimizer; yields both."""
        here = vars(self._optimizer())
        given: dict[str, Any] = {name: here.pop(name) for name in ("grad_scale", "found_inf") if name in here}
        try:
            yield given.get("grad_scale"), given.get("found_inf")
        finally:
            here.update(given)


def _start_momentum(optimizer: torch.optim.SGD) -> bool:
    """Give torch's fused SGD momentum of zeros; False if it must not see a flag before its first step is taken.

    Its first step allocates momentum without values, and leaves it so where the flag says to skip: later steps go on
    from uninitialised memory (as of torch 2.13). Zeros are what its first step starts from, but for dampening, which
    the first step leaves out.
    """
    for group in optimizer.param_groups:
        if group["fused"] and group["momentum"] != 0:
            unset = [
                p
                for p in group["params"]
                if p.grad is not None and optimizer.state.get(p, {}).get("momentum_buffer") is None
            ]
            if unset and group["dampening"] != 0:
                return False
            for param in unset:
                optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param.grad)
    return True


class ClosureOverflowed(Exception):  # noqa: N818 - never leaves a step
    """Leaves an optimizer's step before it has changed anything."""


def guarded(
    closure: Callable[[], Any],
    keeper: MasterKeeper,
    casting: OpCasting | None,
    take_records: Callable[[], list[BackwardRecord]],
    name: str,
    verbose: bool,
) -> Callable[[], Any]:
    """A closure that sees up-to-date 16-bit weights and the casts, and is run again when it overflows.

    Its attribute ``loss`` is what the user's closure returned last.

    A static loss scale would overflow again in the same way. There the step is skipped, if nothing has moved yet.

    Args:
        closure: the user's.
        keeper: the optimizer's masters, which leave their places while the closure runs.
        casting: the op casting in force around the step, which itself runs without.
        take_records: hands over the records of the backward passes since the last call, agreed on by all ranks.
        name: of the optimizer, for messages.
        verbose: whether to log that the closure runs again.
    """
    first = True

    def evaluate() -> Any:
        nonlocal first
        with keeper.out_of_place():
            for _ in range(_RETRIES):
                with torch.enable_grad(), casting if casting is not None else nullcontext():
                    loss = closure()
                records = take_records()
                if not records or not any_overflow(records).item():
                    first, vars(evaluate)["loss"] = False, loss
                    return loss
                if not any(record.dynamic for record in records):
                    if first:
                        raise ClosureOverflowed
                    raise UsageError(
                        f"The closure given to {name}.step overflowed under a static loss scale after the optimizer "
                        "had moved the weights; use a lower scale, or a dynamic one."
                    )
                if verbose:
                    logger.info("Gradient overflow. Running the closure again")
        raise UsageError(
            f"The closure given to {name}.step overflowed {_RETRIES} times in a row, each time at a lower loss scale; "
            "its loss or its gradients are not finite at any scale."
        )

    return evaluate
