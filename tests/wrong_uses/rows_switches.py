"""Wrong values for every switch and every dtype of the faces: a text is no switch, and a switch is no dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import halfstep
from halfstep import amp, fp16_utils, optimizers, static
from halfstep.core.errors import ArgumentTypeError, ArgumentValueError, HalfstepError
from halfstep.core.oplists import OpLists

from .worlds import World, Wrong, at, captured, nothing, plain

__all__ = ["ROWS"]

Use = Callable[[World, Any], Any]


def initialize(name: str, **options: Any) -> Use:
    return lambda w, value: amp.initialize(w.model, w.optimizer, verbosity=0, **{**options, name: value})


def decorate(name: str) -> Use:
    return lambda w, value: amp.decorate(w.model, w.optimizer, **{"level": "O2", name: value})


def static_decorate(name: str) -> Use:
    return lambda w, value: static.amp.decorate(w.optimizer, **{name: value})


_SWITCHES: dict[str, tuple[Callable[[], World], str, Use]] = {
    "initialize": (plain, "enabled", initialize("enabled")),
    "initialize fused": (plain, "fused", initialize("fused", opt_level="O2")),
    "initialize patch": (plain, "patch_torch_functions", initialize("patch_torch_functions")),
    "initialize masters": (plain, "master_weights", initialize("master_weights", opt_level="O2")),
    "scale_loss delay": (
        at(),
        "delay_unscale",
        lambda w, value: amp.scale_loss(w.loss, w.optimizer, delay_unscale=value),
    ),
    "scale_loss check": (
        at(),
        "delay_overflow_check",
        lambda w, value: amp.scale_loss(w.loss, w.optimizer, delay_overflow_check=value),
    ),
    "auto_cast": (nothing, "enable", lambda w, value: amp.auto_cast(value)),
    "auto_cast by name": (nothing, "enable", lambda w, value: amp.auto_cast(enable=value, dtype="float16")),
    "auto_cast promote": (nothing, "use_promote", lambda w, value: amp.auto_cast(level="O2", use_promote=value)),
    "OpLists.custom": (nothing, "use_promote", lambda w, value: OpLists.custom(level="O2", use_promote=value)),
    "decorate fused": (plain, "fused", decorate("fused")),
    "decorate master_weight": (plain, "master_weight", decorate("master_weight")),
    "decorate master_grad": (plain, "master_grad", decorate("master_grad")),
    "give_masters": (plain, "fused", lambda w, value: amp.give_masters(w.optimizer, fused=value)),
    "GradScaler": (nothing, "enable", lambda w, value: amp.GradScaler(value)),
    "GradScaler enabled": (nothing, "enabled", lambda w, value: amp.GradScaler(enabled=value)),
    "GradScaler dynamic": (
        nothing,
        "use_dynamic_loss_scaling",
        lambda w, value: amp.GradScaler(use_dynamic_loss_scaling=value),
    ),
    "init": (nothing, "enabled", lambda w, value: amp.init(value)),
    "init enable": (nothing, "enable", lambda w, value: amp.init(enable=value)),
    "init enable_caching": (nothing, "enable_caching", lambda w, value: amp.init(enable_caching=value)),
    "init verbose": (nothing, "verbose", lambda w, value: amp.init(verbose=value)),
    "init allow_banned": (nothing, "allow_banned", lambda w, value: amp.init(allow_banned=value)),
    "FP16_Optimizer": (
        plain,
        "dynamic_loss_scale",
        lambda w, value: fp16_utils.FP16_Optimizer(w.optimizer, dynamic_loss_scale=value),
    ),
    "FP16_Optimizer verbose": (
        plain,
        "verbose",
        lambda w, value: fp16_utils.FP16_Optimizer(w.optimizer, verbose=value),
    ),
    "TrainStep compiled": (
        plain,
        "compiled",
        lambda w, value: halfstep.TrainStep(w.model, torch.nn.MSELoss(), w.optimizer, compiled=value),
    ),
    "TrainStep cuda_graph": (
        plain,
        "cuda_graph",
        lambda w, value: halfstep.TrainStep(w.model, torch.nn.MSELoss(), w.optimizer, cuda_graph=value),
    ),
    "static decorate promote": (captured, "use_promote", static_decorate("use_promote")),
    "static decorate guard": (captured, "use_amp_guard", static_decorate("use_amp_guard")),
    "static decorate masters": (captured, "master_weight", static_decorate("master_weight")),
    "static decorate scaling": (captured, "use_dynamic_loss_scaling", static_decorate("use_dynamic_loss_scaling")),
    "static decorate pure": (captured, "use_pure_fp16", static_decorate("use_pure_fp16")),
    "static decorate bf16": (captured, "use_bf16", static_decorate("use_bf16")),
    "Executor": (nothing, "compiled", lambda w, value: static.Executor(compiled=value)),
    "Model.prepare scaling": (
        plain,
        "use_dynamic_loss_scaling",
        lambda w, value: halfstep.Model(w.model).prepare(
            w.optimizer, torch.nn.MSELoss(), amp_configs={"level": "O1", "use_dynamic_loss_scaling": value}
        ),
    ),
}
"""By a name for the row: the setup, the name of the argument, and the call."""

_NO_SWITCH: dict[str, tuple[Any, tuple[str, ...]]] = {
    "'no'": ("no", ("'no'", "True")),
    "'float16'": ("float16", ("'float16'", "True")),
    "torch.bfloat16": (torch.bfloat16, ("torch.bfloat16", "True")),
    "2": (2, ("2", "True")),
    "0.0": (0.0, ("0.0", "True")),
    "a tensor": (torch.tensor(True), ("tensor(True)", "True")),
}

_DTYPES: dict[str, tuple[Callable[[], World], str, Use]] = {
    "initialize": (plain, "dtype", initialize("dtype")),
    "initialize weights": (plain, "cast_model_type", initialize("cast_model_type", opt_level="O2")),
    "initialize outputs": (plain, "cast_model_outputs", initialize("cast_model_outputs", opt_level="O2")),
    "auto_cast": (nothing, "dtype", lambda w, value: amp.auto_cast(dtype=value)),
    "decorate": (plain, "dtype", decorate("dtype")),
    "decorate saved": (plain, "save_dtype", decorate("save_dtype")),
    "init": (nothing, "dtype", lambda w, value: amp.init(dtype=value)),
    "Policy.from_level": (nothing, "dtype", lambda w, value: halfstep.Policy.from_level("O1", value)),
    "static decorate": (captured, "dtype", static_decorate("dtype")),
    "Model.prepare": (
        plain,
        "dtype",
        lambda w, value: halfstep.Model(w.model).prepare(
            w.optimizer, torch.nn.MSELoss(), amp_configs={"level": "O1", "dtype": value}
        ),
    ),
    "FusedAdam": (
        plain,
        "state_dtype",
        lambda w, value: optimizers.FusedAdam(w.model.parameters(), state_dtype=value),
    ),
}

_NO_DTYPE: dict[str, tuple[Any, type[HalfstepError], tuple[str, ...]]] = {
    "True": (True, ArgumentTypeError, ("True",)),
    "16": (16, ArgumentTypeError, ("16",)),
    "torch.int8": (torch.int8, ArgumentValueError, ("torch.int8",)),
}

ROWS = [
    *(
        Wrong(f"{face} {name}={shown}", setup, lambda w, use=use, value=value: use(w, value), ArgumentTypeError, words)
        for face, (setup, name, use) in _SWITCHES.items()
        for shown, (value, words) in _NO_SWITCH.items()
    ),
    *(
        Wrong(f"{face} the dtype {name}={shown}", setup, lambda w, use=use, value=value: use(w, value), error, words)
        for face, (setup, name, use) in _DTYPES.items()
        for shown, (value, error, words) in _NO_DTYPE.items()
    ),
]
