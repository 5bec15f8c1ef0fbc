"""``apex.parallel``. ``LARC`` is a module that holds the class, as in Apex."""

from torch.distributed import ReduceOp

from ...parallel import DistributedDataParallel, Reducer
from ...submodules import add_submodules
from ...sync_batchnorm import SyncBatchNorm, convert_syncbn_model, create_syncbn_process_group
from . import LARC, distributed, multiproc, optimized_sync_batchnorm, sync_batchnorm

__all__ = [
    "LARC",
    "DistributedDataParallel",
    "ReduceOp",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
    "distributed",
    "multiproc",
    "optimized_sync_batchnorm",
    "sync_batchnorm",
]

add_submodules(__name__, {"optimized_sync_batchnorm_kernel": "", "sync_batchnorm_kernel": ""})
