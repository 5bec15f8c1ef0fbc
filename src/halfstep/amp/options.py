"""The keyword arguments of ``amp.initialize`` that describe a precision recipe, checked as Apex checked them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from ..core.errors import ArgumentTypeError, ArgumentValueError, UsageError
from ..core.formats import dtype_name, parse_dtype
from ..core.loss_scale import LossScaleSpec, check_loss_scale
from ..core.oplists import OpLists
from ..core.policy import LEVELS, Policy

__all__ = ["Options", "resolve_options"]


@dataclass(frozen=True)
class Options:
    """An opt level's properties under Apex's names, after the overrides.

    Attributes:
        enabled: whether amp does anything.
        opt_level: "O0" to "O3".
        cast_model_type: dtype of the weights; False or None leaves them.
        patch_torch_functions: whether ops are cast (O1).
        keep_batchnorm_fp32: whether BatchNorm stays fp32 when the weights are cast.
        master_weights: whether the optimizer updates fp32 copies.
        loss_scale: a number, "dynamic", or a rule.
    """

    enabled: bool
    opt_level: str
    cast_model_type: Any
    patch_torch_functions: bool
    keep_batchnorm_fp32: bool | None
    master_weights: bool | None
    loss_scale: LossScaleSpec

    @property
    def options(self) -> dict[str, Any]:
        """The properties as a dict, where scripts written for Apex look for them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def policy(self, half: torch.dtype, output_dtype: torch.dtype | str | None, lists: OpLists) -> Policy:
        """The ``Policy`` that these properties describe, with ops cast to ``half`` by some lists."""
        cast = self.cast_model_type or None
        outputs = None if output_dtype is None else parse_dtype(output_dtype, "cast_model_outputs")
        return Policy(
            param_dtype=cast,
            compute_dtype=half if self.patch_torch_functions else cast,
            output_dtype=outputs or (torch.float32 if cast else None),
            op_lists=lists if self.patch_torch_functions else None,
            keep_batchnorm_fp32=bool(self.keep_batchnorm_fp32),
            master_weights=bool(self.master_weights),
            loss_scale=self.loss_scale,
        )

    def describe(self) -> list[str]:
        """One aligned ``name : value`` line for each property."""
        return [f"{name:<22} : {_show(value)}" for name, value in self.options.items()]


def resolve_options(opt_level: str, half: torch.dtype, **overrides: Any) -> tuple[Options, Options]:
    """The defaults of a checked level, and what they become under the overrides that are not None.

    Raises:
        UsageError: for overrides that contradict the level.
        ArgumentValueError: for a value that is not allowed.
        ArgumentTypeError: for a ``cast_model_type`` that is no dtype.
    """
    policy = Policy.from_level(opt_level, half)
    casts_ops = policy.op_lists is not None
    defaults = Options(
        enabled=True,
        opt_level=opt_level,
        cast_model_type=policy.param_dtype,
        patch_torch_functions=casts_ops,
        keep_batchnorm_fp32=None if opt_level in ("O0", "O1") else policy.keep_batchnorm_fp32,
        master_weights=None if casts_ops else policy.master_weights,
        loss_scale=policy.loss_scale,
    )
    given = {name: value for name, value in overrides.items() if value is not None}
    checked = {name: _CHECKS[name](value, opt_level) for name, value in given.items()}
    return defaults, replace(defaults, **checked)


def _cast_model_type(value: Any, level: str) -> Any:
    if value is not False and not isinstance(value, torch.dtype):
        raise ArgumentTypeError(f"cast_model_type={value!r} must be a torch.dtype, or False to leave the model alone.")
    if level == "O1" and value not in (False, torch.float32):
        raise UsageError(
            f"opt_level O1 casts around operations and leaves the weights fp32, so cast_model_type={value} contradicts "
            "it; leave it out, or use O2 or O3 to cast the model."
        )
    return value


def _patch_torch_functions(value: Any, level: str) -> bool:
    if not isinstance(value, bool):
        raise ArgumentTypeError(f"patch_torch_functions={value!r} must be True, False or None.")
    if value and level != "O1":
        raise UsageError(f"patch_torch_functions=True works only at opt_level O1, and this is {level}.")
    return value


def _keep_batchnorm_fp32(value: Any, level: str) -> bool:
    if level == "O1":
        raise UsageError(
            f"At opt_level O1 all weights stay fp32, batchnorm too, so keep_batchnorm_fp32={value!r} has no meaning; "
            "it must be None."
        )
    if value in ("True", "False"):  # command lines hand strings over
        return bool(value == "True")
    if not isinstance(value, bool):
        raise ArgumentValueError(
            f"keep_batchnorm_fp32={value!r} must be a boolean, the string 'True' or 'False', or None."
        )
    return value


def _master_weights(value: Any, level: str) -> bool:
    if level == "O1":
        raise UsageError(
            f"At opt_level O1 the weights themselves are fp32, so master_weights={value!r} has no meaning; drop it."
        )
    if not isinstance(value, bool):
        raise ArgumentTypeError(f"master_weights={value!r} must be True, False or None.")
    return value


def _loss_scale(value: Any, level: str) -> LossScaleSpec:
    return check_loss_scale(value)


_CHECKS = {
    "cast_model_type": _cast_model_type,
    "patch_torch_functions": _patch_torch_functions,
    "keep_batchnorm_fp32": _keep_batchnorm_fp32,
    "master_weights": _master_weights,
    "loss_scale": _loss_scale,
}


def _show(value: Any) -> str:
    return dtype_name(value) if isinstance(value, torch.dtype) else str(value)


def banner(defaults: Options, options: Options, half: torch.dtype) -> str:
    """What is said at verbosity 1: the level, its defaults, and what the overrides made of them."""
    lines = [
        f"Opt level {defaults.opt_level} in {dtype_name(half)}: {LEVELS[defaults.opt_level]}.",
        "Defaults of the level:",
        *("  " + line for line in defaults.describe()),
    ]
    if options != defaults:
        lines += ["With your overrides:", *("  " + line for line in options.describe())]
    return "\n".join(lines)
