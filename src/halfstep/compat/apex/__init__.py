"""Apex's module tree under Apex's names: ``halfstep.apex.install()`` makes ``import apex`` find it.

float16 is the default on every device, as in Apex. ``transformer`` and parts of ``contrib`` are missing; importing a
missing module raises an error that names the replacement.
"""

import warnings
from importlib import import_module
from typing import Any

from ..install import install, uninstall
from ..missing import refuse_missing, refusing

__all__ = ["DeprecatedFeatureWarning", "deprecated_warning", "install", "uninstall"]

__version__ = "0.1"  # what Apex said


class DeprecatedFeatureWarning(FutureWarning):
    """The warning class of Apex, which scripts use in warning filters."""


def deprecated_warning(msg: str) -> None:
    """Warn of a deprecated feature, as Apex did."""
    warnings.warn(msg, DeprecatedFeatureWarning, stacklevel=2)


refuse_missing()
_refuse = refusing(__name__)

_SUBMODULES = (
    *("_autocast_utils", "RNN", "amp", "contrib", "fp16_utils", "fused_dense", "mlp"),
    *("multi_tensor_apply", "normalization", "optimizers", "parallel", "pyprof", "reparameterization"),
)
__dir__ = [*__all__, *_SUBMODULES].copy


def __getattr__(name: str) -> Any:
    """Import a submodule at its first use. In Apex, ``import apex`` imported all submodules."""
    if name in _SUBMODULES:
        return import_module(f".{name}", __name__)
    return _refuse(name)
