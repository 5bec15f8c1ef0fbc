"""``apex.parallel.sync_batchnorm``."""

from ...sync_batchnorm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
