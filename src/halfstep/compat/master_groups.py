"""The parameters of an optimizer and their masters, group by group, under Apex's names."""

from __future__ import annotations

import torch

from ..parameters.masters import held_master
from ..stepping.attached import AttachedOptimizer

__all__ = ["MasterGroups"]


class MasterGroups:
    """Lists of the parameters that have masters, of their masters, and of the other parameters.

    Attributes:
        _attached: the state of the attached optimizer.
    """

    _attached: AttachedOptimizer

    def _groups(self) -> list[list[torch.Tensor]]:
        return [group["params"] for group in self._attached.optimizer.param_groups]

    def _stepped_groups(self) -> list[list[torch.Tensor]]:
        """Return the tensors that steps update: the masters, and the parameters without a master."""
        stepped = self._attached.master_params()
        return [[next(stepped) for _ in group] for group in self._groups()]

    @property
    def fp16_groups(self) -> list[list[torch.Tensor]]:
        """The 16-bit parameters of the model that have masters, group by group."""
        return [[p for p in group if self._attached.window.table.has_master(p)] for group in self._groups()]

    @property
    def fp32_from_fp16_groups(self) -> list[list[torch.Tensor]]:
        """The masters of ``fp16_groups``."""
        return [[held_master(p) for p in group] for group in self.fp16_groups]

    @property
    def fp32_from_fp32_groups(self) -> list[list[torch.Tensor]]:
        """The parameters that need no master."""
        return [[p for p in group if not self._attached.window.table.has_master(p)] for group in self._groups()]
