"""``apex.contrib.optimizers``: the fused optimizers of 2018."""

from ....optimizers import FusedLAMB
from ...optimizers_2018 import FP16_Optimizer, FusedSGD
from ...optimizers_2018 import FusedAdamOf2018 as FusedAdam
from ...submodules import add_submodules, refusing

__all__ = ["FP16_Optimizer", "FusedAdam", "FusedLAMB", "FusedSGD"]

_ADAM = {
    "DistributedFusedAdam": "Use apex.optimizers.FusedAdam with FSDP2 (torch.distributed.fsdp.fully_shard), or in "
    "torch.distributed.optim.ZeroRedundancyOptimizer.",
}
_LAMB = {
    "DistributedFusedLAMB": "Use apex.optimizers.FusedLAMB with FSDP2 (torch.distributed.fsdp.fully_shard), or in "
    "torch.distributed.optim.ZeroRedundancyOptimizer.",
}
__getattr__ = refusing(__name__, {**_ADAM, **_LAMB})

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
    refused={"distributed_fused_adam": _ADAM, "distributed_fused_lamb": _LAMB},
)
