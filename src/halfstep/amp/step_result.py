"""What ``GradScaler.step`` returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["StepResult"]


@dataclass(slots=True, eq=False)
class StepResult:
    """What ``GradScaler.step`` did: ``bool(result)`` says whether the optimizer stepped.

    Attributes:
        returned: what ``optimizer.step`` returned, the loss if it was given a closure. None if the step was skipped.
    """

    _found_inf: torch.Tensor = field(repr=False)
    returned: Any = None

    @property
    def stepped(self) -> torch.Tensor:
        """Whether it stepped, as a 0-dim bool tensor on the device. Reads nothing."""
        return self._found_inf == 0

    def __bool__(self) -> bool:
        """Whether it stepped. Reads the device."""
        return not self._found_inf.item()
