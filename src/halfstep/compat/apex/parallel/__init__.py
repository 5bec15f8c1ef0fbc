"""``apex.parallel``. ``LARC`` is a module here, as it was in Apex, that holds the class."""

from torch.distributed import ReduceOp

from ....distributed.sync_batchnorm import SyncBatchNorm, convert_syncbn_model, create_syncbn_process_group
from ...parallel import DistributedDataParallel, Reducer
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
