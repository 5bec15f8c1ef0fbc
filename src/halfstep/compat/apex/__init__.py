"""Apex's module tree by its own names: ``halfstep.apex.install()`` makes ``import apex`` find it.

float16 is the default on every device, as Apex's was. ``transformer`` and some of ``contrib`` are not here; importing
them says what to use.
"""

import warnings
from importlib import import_module
from typing import Any

from ..install import install, uninstall
from ..missing import refuse_missing, refusing

__all__ = ["DeprecatedFeatureWarning", "deprecated_warning", "install", "uninstall"]

__version__ = "0.1"  # what Apex said


class DeprecatedFeatureWarning(FutureWarning):
    """The warning class of Apex; scripts name it to filter it."""


def deprecated_warning(msg: str) -> None:
    """Warn as Apex did."""
    warnings.warn(msg, DeprecatedFeatureWarning, stacklevel=2)


refuse_missing()
_refuse = refusing(__name__)

_SUBMODULES = (
    *("_autocast_utils", "RNN", "amp", "contrib", "fp16_utils", "fused_dense", "mlp"),
    *("multi_tensor_apply", "normalization", "optimizers", "parallel", "pyprof", "reparameterization"),
)
__dir__ = [*__all__, *_SUBMODULES].copy


def __getattr__(name: str) -> Any:
    """``import apex`` brought the submodules with it; here each comes when asked for."""
    if name in _SUBMODULES:
        return import_module(f".{name}", __name__)
    return _refuse(name)
