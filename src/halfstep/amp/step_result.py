"""``StepResult``, which ``GradScaler.step`` returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["StepResult"]


@dataclass(slots=True, eq=False)
class StepResult:
    """The outcome of ``GradScaler.step``: ``bool(result)`` is True if the optimizer stepped.

    Attributes:
        returned: the result of ``optimizer.step``, the loss if it was given a closure. None if the step was skipped.
    """

    _found_inf: torch.Tensor = field(repr=False)
    returned: Any = None

    @property
    def stepped(self) -> torch.Tensor:
        """A 0-dim bool tensor on the device, True if the optimizer stepped. Reads nothing."""
        return self._found_inf == 0

    def __bool__(self) -> bool:
        """True if the optimizer stepped. Reads the device."""
        return not self._found_inf.item()
