"""Mixed precision in graph mode, by Paddle's names."""

from ..paddle.amp import CustomOpLists, MixedPrecisionOptimizer, decorate, fp16_guard

AutoMixedPrecisionLists = CustomOpLists
"""The same under its other name in Paddle."""

__all__ = ["AutoMixedPrecisionLists", "CustomOpLists", "MixedPrecisionOptimizer", "decorate", "fp16_guard"]
