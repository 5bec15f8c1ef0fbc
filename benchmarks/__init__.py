"""Measurements of speed: ``python -m benchmarks --help``. They need only torch."""
