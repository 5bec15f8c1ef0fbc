"""What DistributedDataParallel sends, what ranks tell each other, SyncBatchNorm, and checkpoints of many ranks."""
