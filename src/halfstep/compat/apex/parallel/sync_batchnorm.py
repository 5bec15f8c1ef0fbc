"""``apex.parallel.sync_batchnorm``."""

from ....distributed.sync_batchnorm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
