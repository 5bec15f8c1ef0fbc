"""``amp.debugging`` by Paddle's names: which ops ran in which dtype, and which tensors hold inf or NaN.

``halfstep.numerics`` sees more, at less cost; this is for scripts and habits that come from Paddle. What is better here
than in Paddle 3.3.1: nothing reseeds a random generator, op lists belong to the config that they were given to,
``debug_step`` works, an exception ends what was begun, and ``compare_accuracy`` writes HTML and CSV.
"""

from .accuracy import compare_accuracy
from .checks import DebugMode, check_numerics
from .operator_stats import (
    collect_operator_stats,
    disable_operator_stats_collection,
    enable_operator_stats_collection,
)
from .tensor_checker import (
    TensorCheckerConfig,
    check_layer_numerics,
    disable_tensor_checker,
    enable_tensor_checker,
)

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
