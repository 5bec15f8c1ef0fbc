"""Training on several processes: averages of gradients, messages between ranks, SyncBatchNorm, and checkpoints."""
