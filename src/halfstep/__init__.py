"""Mixed-precision training for PyTorch."""
