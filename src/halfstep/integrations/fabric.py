"""Lightning Fabric: ``Fabric(plugins=HalfstepFabricPrecision("O2"))``, and the code that Fabric and Trainer share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.plugins.precision import Precision
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn

from .. import amp
from ..core.errors import UsageError
from .training_precision import Level, TrainingPrecision

__all__ = ["BasePrecision", "HalfstepFabricPrecision"]


class BasePrecision(Precision):
    """The common base for Trainer and Fabric; for its arguments, see ``TrainingPrecision``."""

    def __init__(self, level: Level = "O1", dtype: torch.dtype | str | None = None, **options: Any) -> None:
        self._precision = TrainingPrecision.of(level, dtype, **options)
        self.scaler, self.precision = self._precision.scaler, self._precision.name

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Cast the weights."""
        return self._precision.cast(module)

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Enter the casting scope of the precision."""
        with self._precision.scope():
            yield

    def main_params(self, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
        """Yield the fp32 masters of 16-bit parameters, and the other parameters themselves."""
        return amp.master_params(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loss scaler."""
        return self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of the loss scaler."""
        self.scaler.load_state_dict(state_dict)


class HalfstepFabricPrecision(BasePrecision):
    """The precision plugin of a Fabric. At O2 call ``prepare`` before ``fabric.setup``, which hides the optimizer.

    ::

        precision = HalfstepFabricPrecision("O2")
        fabric = Fabric(plugins=precision)
        model, optimizer = fabric.setup(*precision.prepare(model, optimizer))

    Args:
        level: a level or a ``TrainingPrecision``; see ``halfstep.integrations.training_precision.TrainingPrecision``.
        dtype: see ``TrainingPrecision``.
        **options: see ``TrainingPrecision``.
    """

    def prepare(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> tuple[Any, ...]:
        """Cast a model and give masters to its optimizers; returns all of them."""
        self._precision.cast(model)
        for optimizer in optimizers:
            self._precision.give_masters(optimizer)
        return model, *optimizers

    def convert_output(self, data: Any) -> Any:
        """Convert floating outputs to fp32."""
        return apply_to_collection(data, torch.Tensor, lambda t: t.float() if t.is_floating_point() else t)

    def backward(self, tensor: torch.Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Scale the loss before its backward pass."""
        super().backward(self.scaler.scale(tensor), model, *args, **kwargs)

    def unscale_gradients(self, optimizer: Any) -> None:
        """Divide gradients by the loss scale, before they are clipped."""
        self.scaler.unscale_(getattr(optimizer, "optimizer", optimizer))

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step, unless the gradients overflowed. The truth value of the result says if the step was taken."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if not amp.has_masters(optimizer) and any(p.dtype is self._precision.half and p.requires_grad for p in params):
            raise UsageError(
                f"This {type(optimizer).__name__} has 16-bit parameters and no masters, so small updates would be "
                "lost. Write fabric.setup(*precision.prepare(model, optimizer))."
            )
        return self._precision.step(optimizer, **kwargs)
