"""The surroundings of a recorded step: every value that affects the step and that a replay does not read again."""

from __future__ import annotations

import copy
from typing import Any, Protocol

import torch

from ...casting.scope import active_casting
from ...parameters.loss_scaler import DeviceLossScaler
from ...torch_internals.torch_compat import module_hooks, tensor_hooks
from .signature import Signature

__all__ = ["RecordableStep", "surroundings"]


class RecordableStep(Protocol):
    """The interface of a recordable step, which ``TrainStep`` implements."""

    optimizer: torch.optim.Optimizer

    def backward(self, batch: tuple[Any, ...], signature: Signature, *, last: bool) -> torch.Tensor:
        """Run the forward and backward passes."""

    def update(self) -> None:
        """Run the part of a step after the passes."""

    def loss_scalers(self) -> list[DeviceLossScaler]:
        """Return the loss scalers that a step updates."""

    def modules(self) -> list[torch.nn.Module]:
        """Return the modules that a step runs."""

    def settings(self) -> tuple[object, ...]:
        """Return the settings that user code may change between steps."""

    def unrecordable(self) -> str | None:
        """Return the reason why a step cannot be recorded; None if it can."""


def surroundings(step: RecordableStep, params: list[torch.Tensor]) -> tuple[dict[str, object], object]:
    """Collect the current surroundings of a step, for comparison with the surroundings at its recording.

    Args:
        step: the step that is recorded.
        params: the parameters of its optimizer.

    Returns:
        The values by name, and the objects to keep alive: an ``id`` among the values then stays unique.
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
    """Make a hyperparameter comparable. Replays read a tensor on a device, so it must stay the same tensor."""
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        return id(value)
    if name == "lr":  # each replay gets the current rate
        return None
    return value.tolist() if isinstance(value, torch.Tensor) else copy.copy(value)
