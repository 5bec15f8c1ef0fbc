"""``amp.debugging`` by Paddle's names: which ops ran in which dtype, and which tensors hold inf or NaN.

``halfstep.numerics`` sees more at less cost; use this module to port scripts and habits from Paddle. Differences from
Paddle 3.3.1: no call reseeds a random generator, each config keeps its own op lists, ``debug_step`` works, an exception
ends the collection or check that it interrupts, and ``compare_accuracy`` writes CSV.
"""

from .accuracy import compare_accuracy
from .checks import DebugMode, check_numerics
from .operator_stats import collect_operator_stats, disable_operator_stats_collection, enable_operator_stats_collection
from .tensor_checker import TensorCheckerConfig, check_layer_numerics, disable_tensor_checker, enable_tensor_checker

__all__ = [
    "DebugMode",
    "TensorCheckerConfig",
    "check_layer_numerics",
    "check_numerics",
    "collect_operator_stats",
    "compare_accuracy",
    "disable_operator_stats_collection",
    "disable_tensor_checker",
    "enable_operator_stats_collection",
    "enable_tensor_checker",
]
