"""Apex's ``parallel`` on ``torch.distributed``: wrappers with its names and arguments, SyncBatchNorm; checkpoints."""

from torch.distributed import ReduceOp

from ..optimizers.larc import LARC
from .checkpoint import save_checkpoint
from .distributed import DistributedDataParallel, Reducer
from .sync_batchnorm import SyncBatchNorm, convert_syncbn_model, create_syncbn_process_group

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
