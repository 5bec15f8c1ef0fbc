"""Mixed precision in graph mode, by Paddle's names."""

from ..compat.paddle.amp import CustomOpLists, MixedPrecisionOptimizer, decorate, fp16_guard

__all__ = ["CustomOpLists", "MixedPrecisionOptimizer", "decorate", "fp16_guard"]
