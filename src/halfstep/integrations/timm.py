"""timm: ``HalfstepScaler`` replaces ``NativeScaler``, and halfstep's optimizers are added to timm's registry.

Importing this module registers ``halfstepadam``, ``halfstepadamw``, ``halfstepsgd``, ``halfsteplamb``,
``halfstepnovograd``
and ``halfstepadagrad`` for ``timm.optim.create_optimizer_v2``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from timm.optim._optim_factory import OptimInfo, default_registry
from timm.utils.clip_grad import dispatch_clip_grad
from torch import nn

from .. import amp, optimizers
from .training_precision import Level, TrainingPrecision

__all__ = ["HalfstepScaler"]

for _info in (
    OptimInfo("halfstepadam", optimizers.FusedAdam, "Fused Adam", has_betas=True, defaults={"adam_w_mode": False}),
    OptimInfo("halfstepadamw", optimizers.FusedAdam, "Fused AdamW", has_betas=True),
    OptimInfo("halfstepsgd", optimizers.FusedSGD, "Fused SGD", has_eps=False, has_momentum=True),
    OptimInfo("halfsteplamb", optimizers.FusedLAMB, "Fused LAMB", has_betas=True),
    OptimInfo("halfstepnovograd", optimizers.FusedNovoGrad, "Fused NovoGrad", has_betas=True),
    OptimInfo("halfstepadagrad", optimizers.FusedAdagrad, "Fused Adagrad"),
):
    default_registry.register(_info)


class HalfstepScaler:
    """Backward pass, clipping and step with the interface of ``timm.utils.NativeScaler``, and the casts of a level.

    ::

        loss_scaler = HalfstepScaler("O2")
        model, optimizer = loss_scaler.prepare(model, optimizer)  # before any parallel wrapper
        ...
        with loss_scaler.autocast():
            loss = loss_fn(model(x), y)
        loss_scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())

    Args:
        level: a level or a ``TrainingPrecision``; see ``halfstep.integrations.training_precision.TrainingPrecision``.
        dtype: see ``TrainingPrecision``.
        **options: see ``TrainingPrecision``.
    """

    state_dict_key = "amp_scaler"

    def __init__(self, level: Level = "O1", dtype: torch.dtype | str | None = None, **options: Any) -> None:
        self._precision = TrainingPrecision.of(level, dtype, **options)
        self.scaler = self._precision.scaler

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Cast a model and give masters to its optimizer; both are changed in place."""
        self._precision.cast(model)
        self._precision.give_masters(optimizer)
        return model, optimizer

    def autocast(self) -> Any:
        """Return the casting scope for a forward pass and its loss; timm's scripts call it ``amp_autocast``."""
        return self._precision.scope()

    def __call__(
        self,
        loss: torch.Tensor,
        optimizer: Any,
        clip_grad: float | None = None,
        clip_mode: str = "norm",
        parameters: Iterable[torch.Tensor] | None = None,
        create_graph: bool = False,
        need_update: bool = True,
    ) -> Any:
        """Run the backward pass and, with ``need_update``, clipping and a step. The arguments are timm's.

        Without ``parameters`` all parameters of the optimizer are clipped. The truth value of the result says if the
        step was taken.
        """
        self.scaler.scale(loss).backward(create_graph=create_graph)
        if not need_update:
            return None
        if clip_grad is not None:
            self._clip(optimizer, clip_grad, clip_mode, parameters)
        return self._precision.step(optimizer)

    def _clip(self, optimizer: Any, value: float, mode: str, parameters: Iterable[torch.Tensor] | None) -> None:
        own = [param for group in optimizer.param_groups for param in group["params"]]
        chosen = own if parameters is None else list(parameters)
        self.scaler.unscale_(optimizer)
        if mode == "norm" and self._precision.has_masters_of(optimizer, chosen):
            optimizer.clip_master_grads(value)
            return
        masters = {id(param): master for param, master in zip(own, amp.master_params(optimizer), strict=True)}
        dispatch_clip_grad([masters.get(id(param), param) for param in chosen], value, mode=mode)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loss scaler."""
        return self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of the loss scaler."""
        self.scaler.load_state_dict(state_dict)
