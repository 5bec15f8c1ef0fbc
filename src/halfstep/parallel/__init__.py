"""Apex's ``parallel`` on ``torch.distributed``: wrappers with its names and arguments, SyncBatchNorm; checkpoints."""

from torch.distributed import ReduceOp

from ..compat.parallel import DistributedDataParallel, Reducer
from ..compat.sync_batchnorm import SyncBatchNorm, convert_syncbn_model, create_syncbn_process_group
from ..optimizers.larc import LARC
from ..stepping.ranks.checkpoint import save_checkpoint

__all__ = [
    "LARC",
    "DistributedDataParallel",
    "ReduceOp",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
    "save_checkpoint",
]
__dir__ = __all__.copy
