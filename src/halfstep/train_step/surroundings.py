"""The surroundings of a recorded step: all that it depends on and does not read again when it is replayed."""

from __future__ import annotations

import copy
from typing import Any, Protocol

import torch

from ..casting.scope import active_casting
from ..core.torch_compat import module_hooks, tensor_hooks
from ..gradients.loss_scaler import DeviceLossScaler
from .signature import Signature

__all__ = ["Steps", "surroundings"]


class Steps(Protocol):
    """The step that is recorded: ``TrainStep``."""

    optimizer: torch.optim.Optimizer
    accumulate: int

    def backward(self, batch: tuple[Any, ...], signature: Signature, *, last: bool) -> torch.Tensor:
        """Forward and backward passes."""

    def update(self) -> None:
        """Everything after them."""

    def loss_scalers(self) -> list[DeviceLossScaler]:
        """The loss scales that a step moves."""

    def modules(self) -> list[torch.nn.Module]:
        """The modules that it runs."""

    def settings(self) -> tuple[object, ...]:
        """The settings that the caller may change between steps."""

    def unrecordable(self) -> str | None:
        """The reason why a step cannot be recorded; None if it can."""


def surroundings(step: Steps, params: list[torch.Tensor]) -> tuple[dict[str, object], object]:
    """The surroundings of a step now, to be compared with those at its recording.

    Args:
        step: the step that is recorded.
        params: of its optimizer.

    Returns:
        The values by name, and the objects that must be kept: an identity in the values is then not given out again.
    """
    optimizer, device = step.optimizer, params[0].device
    scalers, modules, settings = step.loss_scalers(), step.modules(), step.settings()
    state = [v for p in params for v in optimizer.state.get(p, {}).values() if isinstance(v, torch.Tensor)]
    numbers = [{k: _compared(k, v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    tensors = [t for m in modules for t in (*m.parameters(recurse=False), *m.buffers(recurse=False))]
    scales = [scaler.state(device).scale for scaler in scalers]
    autocast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    now: dict[str, object] = {
        "parameters, buffers or their hooks": [
            (t.data_ptr(), t.requires_grad, len(tensor_hooks(t))) for t in (*params, *tensors)
        ],
        "modules, their modes or hooks": [(id(m), m.training, module_hooks(m)) for m in modules],
        "the optimizer's state": list(map(id, state)),
        "hyperparameters other than lr": numbers,
        "the loss scale or its rule": [(id(scale), s.rule) for scale, s in zip(scales, scalers, strict=True)],
        "settings of the step": [*map(id, settings[:3]), *settings[3:]],
        "casts around the step": (*autocast, active_casting()),
    }
    return now, (scales, modules, settings, state, [dict(group) for group in optimizer.param_groups])


def _compared(name: str, value: Any) -> Any:
    """A hyperparameter as it is compared. A tensor on a device is read at each replay: it must be the same one."""
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        return id(value)
    if name == "lr":  # a replay gets the present one
        return None
    return value.tolist() if isinstance(value, torch.Tensor) else copy.copy(value)
