"""``apex.amp.frontend``: ``initialize`` and ``init`` with the defaults of Apex, and the opt levels as objects."""

from __future__ import annotations

import functools
import inspect
import logging
import os
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from ....amp import init as _init
from ....amp import initialize as _initialize
from ....amp import load_state_dict, master_params, state_dict
from ....amp.options import ARGUMENTS, ResolvedProperties
from ....core.errors import ArgumentValueError, UsageError
from ....core.loss_scale import DynamicLossScale
from ....core.policy import LEVELS, Policy, parse_level
from . import lists

__all__ = [
    "O0",
    "O1",
    "O2",
    "O3",
    "Properties",
    "init",
    "initialize",
    "load_state_dict",
    "master_params",
    "opt_levels",
    "state_dict",
]

logger = logging.getLogger("halfstep")

_IN_BFLOAT16 = ("O4", "O5")  # the ROCm fork's levels


@functools.wraps(_initialize)
def initialize(*args: Any, **kwargs: Any) -> Any:  # noqa: D103 - the docstring of amp applies
    kwargs, scale = _without_ascend(kwargs)
    given = inspect.signature(_initialize).bind(*args, **kwargs).arguments
    if given.get("policy") is not None:
        return _initialize(**given)
    level = given["opt_level"] = os.environ.get("HALFSTEP_OPT_LEVEL") or given.get("opt_level", "O1")
    if level not in _IN_BFLOAT16:
        given["dtype"] = _dtype(given.get("dtype"))
    if given.get("enabled", True):
        if scale:
            _scale_by(scale, given)
        if given.get("op_lists") is None and level in ("O1", "O4"):
            given["op_lists"] = lists.edited()
    return _initialize(**given)


@functools.wraps(_init)
def init(*args: Any, **kwargs: Any) -> Any:  # noqa: D103 - the docstring of amp applies
    kwargs["dtype"] = _dtype(kwargs.get("dtype"))
    kwargs.setdefault("op_lists", lists.edited())
    return _init(*args, **kwargs)


def _dtype(given: Any) -> Any:
    return os.environ.get("HALFSTEP_DTYPE") or given or "float16"


# ---- the arguments of the Ascend fork

_HINTS = ("combine_grad", "combine_ddp", "ddp_replica_count", "check_combined_tensors", "user_cast_preferred")
_SCALE = {
    "dynamic_init_scale": "init_scale",
    "scale_growth_factor": "growth_factor",
    "scale_backoff_factor": "backoff_factor",
    "scale_window": "growth_interval",
}
"""The field of ``DynamicLossScale`` that each argument of the Ascend fork sets."""

_logged: set[str] = set()


def _without_ascend(kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments without the Ascend fork's arguments, and the fork's arguments for the dynamic scale."""
    if kwargs.get("combine_ddp") and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise UsageError(
            "combine_ddp=True lets Ascend's fork average the gradients of all ranks, which nobody would do here. Leave "
            "it out and wrap the model in torch.nn.parallel.DistributedDataParallel after amp.initialize."
        )
    hints = sorted(name for name in _HINTS if kwargs.get(name) is not None)
    if hints and not _logged.issuperset(hints):
        _logged.update(hints)
        logger.info("amp.initialize: %s are not needed here and change nothing.", ", ".join(hints))
    left = {name: value for name, value in kwargs.items() if name not in _HINTS and name not in _SCALE}
    return left, {name: kwargs[name] for name in _SCALE if kwargs.get(name) is not None}


def _scale_by(moving: dict[str, Any], given: dict[str, Any]) -> None:
    """Put the settings of a dynamic scale into the ``loss_scale`` of some arguments."""
    level, _ = parse_level(given.get("opt_level", "O1"))
    spec = given.get("loss_scale") or Policy.from_level(level).loss_scale
    if spec != "dynamic":
        logger.warning("amp.initialize: the loss scale is static, so it is not moved by %s.", ", ".join(moving))
        return
    fields = {_SCALE[name]: value for name, value in moving.items()}
    fields["min_scale"] = given.pop("min_loss_scale", None) or None
    fields["max_scale"] = given.pop("max_loss_scale", 2.0**24)
    given["loss_scale"] = DynamicLossScale(**fields)


# ---- opt levels as objects


class Properties:
    """The options that an opt level sets, in ``options`` and as attributes, checked as ``initialize`` checks them."""

    options: dict[str, Any]

    def __init__(self) -> None:
        vars(self)["options"] = {
            "enabled": False,
            "opt_level": None,
            "cast_model_type": None,
            "patch_torch_functions": False,
            "keep_batchnorm_fp32": None,
            "master_weights": None,
            "loss_scale": 1.0,
        }

    def __getattr__(self, name: str) -> Any:
        if name not in vars(self).get("options", ()):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self.options[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.options:
            raise ArgumentValueError(f"{name!r} is none of the properties {', '.join(self.options)}.")
        check = ARGUMENTS[name].check if name in ARGUMENTS else None
        if check is not None and self.opt_level is not None:
            value = check(value, self.opt_level)
        self.options[name] = value


class _Level:
    name: ClassVar[str]
    brief: ClassVar[str]
    more: ClassVar[str]

    def __init_subclass__(cls) -> None:
        cls.name = cls.__name__
        cls.more = LEVELS[cls.name]
        cls.brief = f"{cls.name}: {cls.more}."

    def __call__(self, properties: Properties) -> Properties:
        """Set the properties of this level, in float16."""
        properties.options.update(ResolvedProperties.of(Policy.from_level(self.name, torch.float16)).options)
        return properties


class O0(_Level):
    """Opt level O0."""


class O1(_Level):
    """Opt level O1."""


class O2(_Level):
    """Opt level O2."""


class O3(_Level):
    """Opt level O3."""


opt_levels = {"O3": O3(), "O2": O2(), "O1": O1(), "O0": O0()}
