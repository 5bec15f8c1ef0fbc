"""Speed, measured so that it can be believed. ``python -m benchmarks --help``; needs torch and nothing else."""
