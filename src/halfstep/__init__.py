"""Mixed-precision training for PyTorch.

Everything NVIDIA Apex's ``amp`` and Paddle's AMP do, on CPU and GPU: opt levels O0 to O3, op lists, loss scaling,
fp32 masters behind 16-bit weights. ``from halfstep import amp`` is where a script begins.
"""

import importlib
from typing import TYPE_CHECKING, Any

from . import amp
from ._version import __version__
from .core.errors import HalfstepError
from .core.loss_scale import DynamicLossScale, StaticLossScale
from .core.oplists import OpLists
from .core.policy import Policy

if TYPE_CHECKING:
    from . import numerics as numerics
    from .findings import Finding as Finding
    from .findings import check as check
    from .findings import watch as watch
    from .model import Model as Model
    from .train_step import TrainStep as TrainStep

__all__ = [
    "DynamicLossScale",
    "Finding",
    "HalfstepError",
    "Model",
    "OpLists",
    "Policy",
    "StaticLossScale",
    "TrainStep",
    "__version__",
    "amp",
    "check",
    "numerics",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name == "Model":  # imported when asked for: torch's data loaders take their time
        from .model import Model

        return Model
    if name == "TrainStep":
        from .train_step import TrainStep

        return TrainStep
    if name in ("Finding", "check", "watch"):
        from . import findings

        return getattr(findings, name)
    if name == "numerics":
        return importlib.import_module(".numerics", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
