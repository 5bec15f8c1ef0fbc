"""``apex.contrib.layer_norm``."""

from .layer_norm import FastLayerNorm

__all__ = ["FastLayerNorm"]
