"""Say why a training step is not faster."""
