"""``apex.parallel``. ``LARC`` is a module here, as it was in Apex, that holds the class."""

from ...parallel import (
    DistributedDataParallel,
    ReduceOp,
    Reducer,
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
)
from . import LARC, multiproc, sync_batchnorm

__all__ = [
    "LARC",
    "DistributedDataParallel",
    "ReduceOp",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
    "multiproc",
    "sync_batchnorm",
]
