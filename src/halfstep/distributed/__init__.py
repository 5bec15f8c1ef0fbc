"""Training on several processes: averages of gradients, messages between ranks, and checkpoints."""
