"""Gradients: where they lie, unscaling, and the loss scale in use."""
