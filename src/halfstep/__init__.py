"""Mixed-precision training for PyTorch.

Everything NVIDIA Apex's ``amp`` and Paddle's AMP do, on CPU and GPU: opt levels O0 to O3, op lists, loss scaling,
fp32 masters behind 16-bit weights. ``from halfstep import amp`` is where a script begins.
"""

import importlib
from functools import partial
from typing import TYPE_CHECKING, Any

from ._version import __version__
from .core.names_above import NAMES_ABOVE

if TYPE_CHECKING:
    from . import amp as amp
    from . import numerics as numerics
    from .amp.train_step import TrainStep as TrainStep
    from .core.errors import HalfstepError as HalfstepError
    from .core.loss_scale import DynamicLossScale as DynamicLossScale
    from .core.loss_scale import StaticLossScale as StaticLossScale
    from .core.oplists import OpLists as OpLists
    from .core.policy import Policy as Policy
    from .diagnosis import Diagnosis as Diagnosis
    from .diagnosis import diagnose as diagnose
    from .diagnostics.findings import Finding as Finding
    from .diagnostics.findings import check as check
    from .diagnostics.findings import watch as watch
    from .diagnostics.findings.memory import memory as memory
    from .paddle.model import Model as Model
    from .profiling import Profile as Profile
    from .profiling import profile as profile
    from .searching.guard import Guard as Guard
    from .searching.result import SearchResult as SearchResult
    from .searching.search import search as search

__all__ = [
    "Diagnosis",
    "DynamicLossScale",
    "Finding",
    "Guard",
    "HalfstepError",
    "Model",
    "OpLists",
    "Policy",
    "Profile",
    "SearchResult",
    "StaticLossScale",
    "TrainStep",
    "__version__",
    "amp",
    "check",
    "diagnose",
    "memory",
    "numerics",
    "profile",
    "search",
    "watch",
]

# Imported when asked for: `halfstep --help` needs no torch, and a script needs few of the modules.
_HOMES = {
    "HalfstepError": "core.errors",
    "Model": "paddle.model",
    "OpLists": "core.oplists",
    "Policy": "core.policy",
    "TrainStep": "amp.train_step",
    **dict.fromkeys(("DynamicLossScale", "StaticLossScale"), "core.loss_scale"),
    **dict.fromkeys(("Finding", "check", "watch"), "diagnostics.findings"),
    **dict.fromkeys(("Guard", "SearchResult", "search"), "searching.search"),
    **dict.fromkeys(("Diagnosis", "diagnose"), "diagnosis"),
    **dict.fromkeys(("Profile", "profile"), "profiling"),
    "memory": "diagnostics.findings.memory",
}
_MODULES = (
    *("amp", "apex", "formats", "fp16_utils", "integrations", "kernels", "metrics", "model", "multi_tensor"),
    *("numerics", "oplists", "optimizers", "parallel", "scaling", "static"),
)
_OF_AMP = (
    *("GradScaler", "auto_cast", "autocast", "decorate", "init", "initialize", "load_state_dict", "master_params"),
    *("scale_loss", "state_dict"),
)
"""Names of ``amp`` that are looked for here; without importing it, since any name may be asked for."""


def _find(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f".{module}", __name__), name)


_ABOVE = {
    "init": "compat.handle_2018",
    "parity": "parity.two_sides",
    "_amp_state": "compat.amp_state",
    **dict.fromkeys(("rules_of_products", "set_products"), "formats.scope"),
    **dict.fromkeys(("Methods", "Scaler", "Stash"), "compat.amp_stash"),
}
NAMES_ABOVE.update({name: partial(_find, module, name) for name, module in _ABOVE.items()})


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name in _HOMES:
        found = globals()[name] = _find(_HOMES[name], name)
        return found
    hint = f" Did you mean halfstep.amp.{name}? Write `from halfstep import amp`." if name in _OF_AMP else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{hint}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES})
