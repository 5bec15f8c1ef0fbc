"""``apex.parallel.optimized_sync_batchnorm``."""

from ...sync_batchnorm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
