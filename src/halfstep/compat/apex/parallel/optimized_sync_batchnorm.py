"""``apex.parallel.optimized_sync_batchnorm``."""

from ....distributed.sync_batchnorm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
