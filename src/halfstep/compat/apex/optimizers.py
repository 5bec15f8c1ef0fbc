"""``apex.optimizers``, including the names of Ascend's fork."""

from __future__ import annotations

from typing import Any

from torch.optim import Adadelta, RMSprop

from ...optimizers import FusedAdagrad, FusedLAMB, FusedMixedPrecisionLamb, FusedNovoGrad, FusedSGD
from ..fp16_optimizer_2018 import FP16OptimizerOf2018 as FP16_Optimizer
from ..optimizers_2018 import ApexFusedAdam as FusedAdam
from ..submodules import add_submodules

__all__ = [
    "FP16_Optimizer",
    "FusedAdagrad",
    "FusedAdam",
    "FusedLAMB",
    "FusedMixedPrecisionLamb",
    "FusedNovoGrad",
    "FusedSGD",
    "NpuFusedAdadelta",
    "NpuFusedAdam",
    "NpuFusedAdamW",
    "NpuFusedRMSprop",
    "NpuFusedSGD",
]

NpuFusedSGD, NpuFusedAdadelta, NpuFusedRMSprop = FusedSGD, Adadelta, RMSprop


class NpuFusedAdam(FusedAdam):
    """``FusedAdam`` with the arguments of ``torch.optim.Adam``: weight decay is added to the gradient."""

    _mode, _decay = False, 0.0

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float | None = None, amsgrad: bool = False,
    ) -> None:  # fmt: skip
        decay = self._decay if weight_decay is None else weight_decay
        super().__init__(params, lr, betas=betas, eps=eps, adam_w_mode=self._mode, weight_decay=decay, amsgrad=amsgrad)


class NpuFusedAdamW(NpuFusedAdam):
    """``FusedAdam`` with the arguments of ``torch.optim.AdamW``, whose weight decay of 0.01 is decoupled."""

    _mode, _decay = True, 1e-2


add_submodules(
    __name__,
    {
        "fp16_optimizer": "FP16_Optimizer",
        "fused_adagrad": "FusedAdagrad",
        "fused_adam": "FusedAdam",
        "fused_lamb": "FusedLAMB",
        "fused_mixed_precision_lamb": "FusedMixedPrecisionLamb",
        "fused_novograd": "FusedNovoGrad",
        "fused_sgd": "FusedSGD",
        "npu_fused_adadelta": "NpuFusedAdadelta",
        "npu_fused_adam": "NpuFusedAdam",
        "npu_fused_adamw": "NpuFusedAdamW",
        "npu_fused_rmsprop": "NpuFusedRMSprop",
        "npu_fused_sgd": "NpuFusedSGD",
    },
)
