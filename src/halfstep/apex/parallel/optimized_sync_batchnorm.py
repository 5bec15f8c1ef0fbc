"""``apex.parallel.optimized_sync_batchnorm``."""

from ...parallel import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
