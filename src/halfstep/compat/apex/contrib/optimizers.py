"""``apex.contrib.optimizers``: the fused optimizers of 2018."""

from ....optimizers import FusedLAMB
from ...fp16_optimizer_2018 import FP16OptimizerOf2018 as FP16_Optimizer
from ...optimizers_2018 import ApexFusedSGD as FusedSGD
from ...optimizers_2018 import FusedAdamOf2018 as FusedAdam
from ...submodules import add_submodules

__all__ = ["FP16_Optimizer", "FusedAdam", "FusedLAMB", "FusedSGD"]

add_submodules(
    __name__,
    {
        "distributed_fused_adam": "",
        "distributed_fused_lamb": "",
        "fp16_optimizer": "FP16_Optimizer",
        "fused_adam": "FusedAdam",
        "fused_lamb": "FusedLAMB",
        "fused_sgd": "FusedSGD",
    },
)
