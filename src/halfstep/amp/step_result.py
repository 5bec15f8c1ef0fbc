"""What ``GradScaler.step`` returns."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["StepResult"]


class StepResult:
    """What ``GradScaler.step`` did: ``bool(result)`` says whether the optimizer stepped.

    Attributes:
        returned: what ``optimizer.step`` returned, the loss if it was given a closure. None if the step was skipped.
    """

    __slots__ = ("_found_inf", "returned")

    def __init__(self, found_inf: torch.Tensor, returned: Any = None) -> None:
        self._found_inf = found_inf
        self.returned = returned

    @property
    def stepped(self) -> torch.Tensor:
        """Whether it stepped, as a 0-dim bool tensor on the device. Reads nothing."""
        return self._found_inf == 0

    def __bool__(self) -> bool:
        """Whether it stepped. Reads the device."""
        return not self._found_inf.item()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(returned={self.returned!r})"
