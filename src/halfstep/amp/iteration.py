"""The state of a ``GradScaler`` in one iteration, from one ``update`` to the next, and the result of its ``step``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..core.errors import UsageError
from ..stepping.backward import Window
from ..torch_internals.torch_compat import OptState, new_optimizer_state

__all__ = ["Iteration", "StepResult"]


@dataclass
class Iteration:
    """The stage of each optimizer in an iteration, the overflow flags, and the gradients that are already unscaled.

    Several optimizers of one scaler may share a parameter, whose gradient must be unscaled only once. It counts as
    unscaled if it is the tensor in ``unscaled``, until a backward pass of a later loss adds to it. Changes before that
    loss was scaled, such as clipping, do not count.

    Attributes:
        states: the stage and overflow flags of each optimizer, by its ``id``, in the format of torch's scaler.
        windows: the windows of the optimizers whose gradients were unscaled.
        losses: the number of scaled losses.
        unscaled: for each parameter, by its ``id``, the gradient that was unscaled, and its version when the next loss
            was scaled; None before that.
    """

    states: dict[int, dict[str, Any]] = field(default_factory=lambda: defaultdict(new_optimizer_state))
    windows: list[Window] = field(default_factory=list)
    losses: int = 0
    unscaled: dict[int, tuple[torch.Tensor, int | None]] = field(default_factory=dict)

    def refuse_second(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse to unscale the gradients of an optimizer twice.

        Raises:
            UsageError: if the gradients were already unscaled, or the optimizer already stepped.
        """
        stage = self.states[id(optimizer)]["stage"]
        if stage is OptState.UNSCALED:
            raise UsageError("unscale_() has already been called on this optimizer since the last update().")
        if stage is OptState.STEPPED:
            raise UsageError("unscale_() is being called after step().")

    def overflow(self) -> torch.Tensor:
        """Return a 0-dim float32 tensor, 1.0 if the gradients of any optimizer overflowed.

        Raises:
            UsageError: if no gradients were unscaled.
        """
        flags = [flag for state in self.states.values() for flag in state["found_inf_per_device"].values()]
        if not flags:
            raise UsageError(
                "update() was called, but no optimizer was stepped or unscaled since the last update(), so the scaler "
                "cannot know if gradients overflowed. Call scaler.step(optimizer) first."
            )
        found_inf: torch.Tensor = flags[0]
        for flag in flags[1:]:
            found_inf = torch.maximum(found_inf, flag.to(found_inf.device, non_blocking=True))
        return found_inf

    def fix_versions(self) -> None:
        """Record the versions of unscaled gradients when a loss is scaled, to which a pass of that loss may add."""
        for key, (grad, version) in self.unscaled.items():
            self.unscaled[key] = grad, grad._version if version is None else version

    def among(self, params: Sequence[torch.Tensor]) -> set[int]:
        """Return the identities of the parameters whose gradients are already unscaled."""
        found = set()
        for param in params:
            grad, version = self.unscaled.get(id(param), (None, None))
            if grad is not None and param.grad is grad and version in (None, grad._version):
                found.add(id(param))
        return found


@dataclass(slots=True, eq=False)
class StepResult:
    """The outcome of ``GradScaler.step``: ``bool(result)`` is True if the optimizer stepped.

    Attributes:
        returned: the result of ``optimizer.step``, which is the loss if it got a closure; None for a skipped step.
    """

    _found_inf: torch.Tensor = field(repr=False)
    returned: Any = None

    @property
    def stepped(self) -> torch.Tensor:
        """A 0-dim bool tensor on the device, True if the optimizer stepped. Does not wait for the device."""
        return self._found_inf == 0

    def __bool__(self) -> bool:
        """True if the optimizer stepped. Reads the device."""
        return not self._found_inf.item()
